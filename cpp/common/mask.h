// Masks: which keys of its document a query row may see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace distca {

enum class MaskKind : int64_t { kCausal = 0, kFull = 1 };
inline constexpr int64_t kNumMaskKinds = 2;

/// The keys that row i of a document of `length` rows may see. Causal: [0, i]. Full: [0, length). A window W leaves
/// those that are less than W rows away: causal (i - W, i], full (i - W, i + W).
struct Mask {
  MaskKind kind = MaskKind::kCausal;
  int64_t window = 0;  // 0: none

  bool operator==(const Mask&) const = default;

  constexpr bool is_full() const { return kind == MaskKind::kFull; }
};

/// Rows [begin, end) of a document that see those after them up to `end`, too, where the mask is causal: a prefix, or
/// the tokens of an image.
struct BidirectionalRows {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const BidirectionalRows&) const = default;
};

/// The mask of one document: a Mask, and rows that see each other besides as far as a window reaches. The keys that a
/// row sees are one range, and so are the rows that see a key. Both ends of these ranges never fall from one row, or
/// key, to the next.
struct DocumentMask {
  Mask mask;
  std::span<const BidirectionalRows> bidirectional;  // ascending and disjoint

  /// The first one of `bidirectional` that ends after `row`; it may begin after `row`. One past the last if none does.
  constexpr const BidirectionalRows* ending_after(int64_t row) const {
    const BidirectionalRows *low = bidirectional.data(), *const end = low + bidirectional.size();
    for (int64_t n = end - low; n > 0;) {
      const int64_t half = n / 2;
      if (low[half].end <= row) {
        low += half + 1;
        n -= half + 1;
      } else {
        n = half;
      }
    }
    return low;
  }

  // The keys [first_key, end_key) that a row sees.
  constexpr int64_t first_key(int64_t row) const { return begin_of_window(row); }
  constexpr int64_t end_key(int64_t row, int64_t length) const {
    if (mask.is_full()) return end_of_window(row, length);
    const BidirectionalRows* const own = rows_with(row);
    return own == nullptr ? row + 1 : own->end;
  }
  // The rows [first_row, end_row) that see a key.
  constexpr int64_t first_row(int64_t key) const {
    if (mask.is_full()) return begin_of_window(key);
    const BidirectionalRows* const own = rows_with(key);
    return own == nullptr ? key : own->begin;
  }
  constexpr int64_t end_row(int64_t key, int64_t length) const { return end_of_window(key, length); }

 private:
  // The first place within the window of `place`, and the end of those after it.
  constexpr int64_t begin_of_window(int64_t place) const {
    return mask.window == 0 || place < mask.window ? 0 : place - mask.window + 1;
  }
  constexpr int64_t end_of_window(int64_t place, int64_t length) const {
    return mask.window == 0 ? length : std::min(length, place + mask.window);
  }
  /// The one that has this row, or null.
  constexpr const BidirectionalRows* rows_with(int64_t row) const {
    if (bidirectional.empty()) return nullptr;
    const BidirectionalRows* const found = ending_after(row);
    return found != bidirectional.data() + bidirectional.size() && found->begin <= row ? found : nullptr;
  }
};

}  // namespace distca
