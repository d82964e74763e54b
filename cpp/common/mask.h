// Masks: which keys of its document a query row may see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace distca {

enum class MaskKind : int64_t { kCausal = 0, kFull = 1 };
inline constexpr int64_t kNumMaskKinds = 2;

/// The keys that row i of a document of `length` rows may see. Causal: [0, i]. Causal with a window W: (i - W, i].
/// Full: [0, length).
struct Mask {
  MaskKind kind = MaskKind::kCausal;
  int64_t window = 0;  // 0: none; causal only

  bool operator==(const Mask&) const = default;

  /// Whether there is such a mask.
  constexpr bool is_possible() const { return window >= 0 && (window == 0 || kind == MaskKind::kCausal); }
};

/// Rows [begin, end) of a document that see those after them up to `end`, too: a prefix, or the tokens of an image.
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
  constexpr int64_t first_key(int64_t row) const {
    return mask.kind == MaskKind::kFull || mask.window == 0 || row < mask.window ? 0 : row - mask.window + 1;
  }
  constexpr int64_t end_key(int64_t row, int64_t length) const {
    if (mask.kind == MaskKind::kFull) return length;
    const BidirectionalRows* const own = rows_with(row);
    return own == nullptr ? row + 1 : own->end;
  }
  // The rows [first_row, end_row) that see a key.
  constexpr int64_t first_row(int64_t key) const {
    if (mask.kind == MaskKind::kFull) return 0;
    const BidirectionalRows* const own = rows_with(key);
    return own == nullptr ? key : own->begin;
  }
  constexpr int64_t end_row(int64_t key, int64_t length) const {
    return mask.kind == MaskKind::kFull || mask.window == 0 ? length : std::min(length, key + mask.window);
  }

 private:
  /// The one that has this row, or null.
  constexpr const BidirectionalRows* rows_with(int64_t row) const {
    if (bidirectional.empty()) return nullptr;
    const BidirectionalRows* const found = ending_after(row);
    return found != bidirectional.data() + bidirectional.size() && found->begin <= row ? found : nullptr;
  }
};

}  // namespace distca
