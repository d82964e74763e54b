// Shards: contiguous rows and key/value heads of a document, what they cost, what moving them costs, and which of them
// brings a wanted cost at the fewest bytes.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "plan/cost.h"

namespace distca::plan {

/// Which messages count as the bytes of a plan.
enum class Objective : int64_t { kAll = 0, kForward = 1 };

/// Bytes of one row of one key/value head and its query heads (of all heads where none may be split off) that is
/// computed away from its home.
struct Prices {
  int64_t query_row = 0;  // there and back: q, out, lse; and in backward q, dout, lse, delta, dq
  int64_t key_row = 0;    // k, v; and in backward k, v again and dk, dv as fp32 partials, since the home computes
                          // rows of nearly every document that it shares
};
Prices prices(const HeadShape& heads, bool split_heads, Objective objective);

/// Rows [begin, end) of a document, of `num_heads` of its key/value heads.
struct Shard {
  int64_t begin = 0, end = 0;
  int64_t num_heads = 0;
  int64_t cost = 0;   // of all heads
  int64_t bytes = 0;  // if the server holds no key row of the document yet

  bool empty() const { return num_heads == 0; }
  /// More cost for a byte; then more cost.
  bool better_than(const Shard& other) const;
};

/// Costs and shards of documents under one mask. Costs are exact integers; where a root is needed, the floating-point
/// one is a first guess only.
class ShardFinder {
 public:
  ShardFinder(const HeadShape& heads, const Mask& mask, const CostModel& cost, Objective objective, bool split_heads);

  int64_t cost(int64_t length, int64_t begin, int64_t end) const { return cost_.cost(mask_, length, begin, end); }
  /// Key rows that query rows [begin, end) see.
  int64_t num_keys(int64_t length, int64_t begin, int64_t end) const {
    return mask_.end_key(end - 1, length) - mask_.first_key(begin);
  }
  int64_t bytes(int64_t num_rows, int64_t num_keys) const {
    return num_rows * prices_.query_row + num_keys * prices_.key_row;
  }
  const Prices& prices() const { return prices_; }
  const Mask& mask() const { return mask_; }

  /// The lowest row from which on rows up to `end` cost at most `budget`; at least `begin`.
  int64_t tail_begin(int64_t length, int64_t begin, int64_t end, int64_t budget) const;
  /// The rows at the end of [begin, end) that bring the most cost for a byte.
  int64_t best_tail(int64_t length, int64_t begin, int64_t end) const;
  /// That most cost for 2^20 bytes.
  int64_t value(int64_t length, int64_t begin, int64_t end) const;

  /// Of rows [begin, end) of `num_heads` heads, the shard of at most `budget` that brings the most cost for a byte.
  /// Neither it nor what is left of a head's rows has fewer than `min_rows` rows, unless there is none left. Empty if
  /// there is no such shard.
  Shard best(int64_t length, int64_t begin, int64_t end, int64_t num_heads, int64_t budget, int64_t min_rows) const;
  /// The same with exactly `num_heads` heads.
  Shard of_heads(int64_t length, int64_t begin, int64_t end, int64_t num_heads, int64_t budget, int64_t min_rows) const;

 private:
  /// The last row from which on `num_rows` rows of [begin, end), which has twice as many, cost at most `budget`; -1 if
  /// there is none.
  int64_t last_affordable(int64_t length, int64_t begin, int64_t end, int64_t budget, int64_t num_rows) const;
  bool grows(int64_t row) const { return mask_.kind == MaskKind::kCausal && (mask_.window == 0 || row < mask_.window); }

  Mask mask_;
  CostModel cost_;
  Prices prices_;
  int64_t tail_fraction_ = 0;
};

}  // namespace distca::plan
