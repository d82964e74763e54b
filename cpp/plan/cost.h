// The cost of a task, by which the scheduler balances.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"
#include "common/mask.h"

namespace distca::plan {

/// Number of causal (row, key) pairs of query rows [q_begin, q_end). Row i sees keys 0..i.
constexpr int64_t causal_pairs(int64_t q_begin, int64_t q_end) {
  const int64_t n = q_end - q_begin, twice_mean = q_begin + q_end + 1;
  return n % 2 == 0 ? n / 2 * twice_mean : n * (twice_mean / 2);  // n odd makes q_begin + q_end + 1 even
}

/// A document, as far as costs depend on it.
struct Document {
  int64_t length = 0;
  DocumentMask mask;

  /// Number of keys that query rows [q_begin, q_end) see.
  constexpr int64_t num_keys(int64_t q_begin, int64_t q_end) const {
    return mask.end_key(q_end - 1, length) - mask.first_key(q_begin);
  }
};

/// Number of (row, key) pairs of query rows [q_begin, q_end) that are visible because rows see each other besides.
constexpr int64_t bidirectional_pairs(const DocumentMask& mask, int64_t q_begin, int64_t q_end) {
  if (mask.bidirectional.empty() || mask.mask.is_full()) return 0;
  const auto sum_below = [](int64_t n) { return n <= 0 ? 0 : n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n; };
  const BidirectionalRows* const last = mask.bidirectional.data() + mask.bidirectional.size();
  int64_t pairs = 0;
  for (const BidirectionalRows* b = mask.ending_after(q_begin); b != last && b->begin < q_end; ++b) {
    const int64_t from = q_begin > b->begin ? q_begin : b->begin, upto = q_end < b->end ? q_end : b->end;
    pairs += sum_below(b->end - from) - sum_below(b->end - upto);  // row i sees b->end - 1 - i keys after itself
  }
  return pairs;
}

/// Number of causal (row, key) pairs of query rows [q_begin, q_end) under a window.
constexpr int64_t window_pairs(int64_t window, int64_t q_begin, int64_t q_end) {
  const int64_t growing_end = q_end < window ? q_end : window;  // rows before it see all keys from 0 on
  const int64_t steady_begin = q_begin > window ? q_begin : window;
  return (q_begin < growing_end ? causal_pairs(q_begin, growing_end) : 0) +
         (steady_begin < q_end ? (q_end - steady_begin) * window : 0);
}

/// Number of (row, key) pairs of query rows [q_begin, q_end) that the mask itself makes visible.
constexpr int64_t masked_pairs(const Document& document, int64_t q_begin, int64_t q_end) {
  const Mask& mask = document.mask.mask;
  const int64_t rows = q_end - q_begin, length = document.length;
  if (mask.window == 0) return mask.is_full() ? rows * length : causal_pairs(q_begin, q_end);
  const int64_t before = window_pairs(mask.window, q_begin, q_end);
  // From the end of the document on, rows see those after them as, from its begin on, those before them.
  return mask.is_full() ? before + window_pairs(mask.window, length - q_end, length - q_begin) - rows : before;
}

/// Number of visible (row, key) pairs of query rows [q_begin, q_end).
constexpr int64_t visible_pairs(const Document& document, int64_t q_begin, int64_t q_end) {
  return masked_pairs(document, q_begin, q_end) + bidirectional_pairs(document.mask, q_begin, q_end);
}

/// How the time of a visible pair depends on the size of its task, in units of kRateUnit. Entry (i, j) is for 2^i query
/// rows that see 2^j keys in all; the entries lie row after row. Between entries the rate is linear, and beyond the
/// last entry it is constant.
struct RateTable {
  static constexpr int64_t kRateUnit = 1024;
  static constexpr int64_t kMaxOctaves = 32;

  int64_t num_keys_octaves = 0;
  std::vector<int64_t> rates;  // empty: kRateUnit everywhere

  int64_t num_rows_octaves() const { return static_cast<int64_t>(rates.size()) / num_keys_octaves; }
  int64_t at(int64_t num_rows, int64_t num_keys) const {
    const Position i = position(num_rows, num_rows_octaves()), j = position(num_keys, num_keys_octaves);
    const int64_t low = between(entry(i.octave, j.octave), entry(i.octave, j.next), j.part);
    const int64_t high = between(entry(i.next, j.octave), entry(i.next, j.next), j.part);
    return between(low, high, i.part);
  }

 private:
  struct Position {
    int64_t octave, next, part;  // part: 1024ths of the way from `octave` to `next`
  };
  static Position position(int64_t n, int64_t num_octaves) {
    const int64_t octave = std::bit_width(static_cast<uint64_t>(n)) - 1;
    if (octave >= num_octaves - 1) return {num_octaves - 1, num_octaves - 1, 0};
    return {octave, octave + 1, (n << 10 >> octave) - 1024};
  }
  static int64_t between(int64_t a, int64_t b, int64_t part) { return a + (b - a) * part / 1024; }
  int64_t entry(int64_t i, int64_t j) const { return rates[static_cast<size_t>(i * num_keys_octaves + j)]; }
};

/// The time of a task in arbitrary integer units: `per_pair` for each visible (row, key) pair and head, times the rate
/// of the task's size and rounded up, plus `per_row` for each query row. The default counts pairs.
struct DISTCA_EXPORT CostModel {
  int64_t per_pair = 1;
  int64_t per_row = 0;
  RateTable rates = {};

  int64_t cost(const Document& document, int64_t q_begin, int64_t q_end) const {
    const int64_t pairs = per_pair * visible_pairs(document, q_begin, q_end), rows = per_row * (q_end - q_begin);
    if (rates.rates.empty() || q_begin >= q_end) return pairs + rows;
    const __int128 scaled = static_cast<__int128>(pairs) * rates.at(q_end - q_begin, document.num_keys(q_begin, q_end));
    return static_cast<int64_t>((scaled + RateTable::kRateUnit - 1) / RateTable::kRateUnit) + rows;
  }
  /// Whether a task costs as much as its parts together.
  bool is_additive() const { return rates.rates.empty(); }
  /// A lower bound: however these pairs and rows are cut into tasks, the tasks cost no less together.
  int64_t least_cost(int64_t pairs, int64_t rows) const;
  uint64_t digest() const;
  void check() const;
};

}  // namespace distca::plan
