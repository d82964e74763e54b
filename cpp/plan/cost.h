// The cost of a task: what the scheduler balances.
#pragma once

#include <cstdint>

#include "common/digest.h"
#include "common/dtype.h"
#include "common/error.h"

namespace distca::plan {

/// Causal (row, key) pairs of query rows [q_begin, q_end): row i sees keys 0..i.
constexpr int64_t causal_pairs(int64_t q_begin, int64_t q_end) {
  const int64_t n = q_end - q_begin, twice_mean = q_begin + q_end + 1;
  return n % 2 == 0 ? n / 2 * twice_mean : n * (twice_mean / 2);  // n odd makes q_begin + q_end + 1 even
}

/// Visible (row, key) pairs of query rows [q_begin, q_end) of a document of `length` rows.
constexpr int64_t visible_pairs(const Mask& mask, int64_t length, int64_t q_begin, int64_t q_end) {
  if (mask.kind == MaskKind::kFull) return (q_end - q_begin) * length;
  if (mask.window == 0) return causal_pairs(q_begin, q_end);
  const int64_t growing_end = q_end < mask.window ? q_end : mask.window;  // rows before it see all rows before them
  const int64_t steady_begin = q_begin > mask.window ? q_begin : mask.window;
  return (q_begin < growing_end ? causal_pairs(q_begin, growing_end) : 0) +
         (steady_begin < q_end ? (q_end - steady_begin) * mask.window : 0);
}

/// Time of a task in arbitrary integer units: `per_pair` for each visible (row, key) pair and head, `per_row` for each
/// query row. The default counts pairs.
struct CostModel {
  int64_t per_pair = 1;
  int64_t per_row = 0;

  constexpr int64_t cost(const Mask& mask, int64_t length, int64_t q_begin, int64_t q_end) const {
    return per_pair * visible_pairs(mask, length, q_begin, q_end) + per_row * (q_end - q_begin);
  }
  uint64_t digest() const {
    const int64_t words[] = {per_pair, per_row};
    return distca::digest(words);
  }
  void check() const {
    constexpr int64_t kMax = 1 << 20;
    require(per_pair >= 0 && per_row >= 0 && per_pair + per_row > 0 && per_pair <= kMax && per_row <= kMax,
            "cost model: per_pair = ", per_pair, ", per_row = ", per_row, "; integers from 0 to ", kMax,
            ", not both 0, are allowed");
  }
};

}  // namespace distca::plan
