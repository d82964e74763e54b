// Shards: contiguous rows and key/value heads of a document, what they cost, how many bytes moving them takes, and
// which shard of a wanted cost takes the fewest bytes.
#pragma once

#include <cstdint>

#include "plan/options.h"

namespace distca::plan {

/// Bytes that a row takes when it is computed away from its home: one row of one key/value head and its query heads, or
/// of all heads where heads may not be split.
struct Prices {
  int64_t query_row = 0;     // forward: q, out, lse; backward: q, dout, lse, delta, dq
  int64_t key_row = 0;       // forward: k, v; backward: k, v again, and dk, dv in the dtype in which contributions of
                             // several servers travel, because the home computes rows of nearly every document that it
                             // shares
  int64_t sole_key_row = 0;  // of a key whose gradients one server alone has, in the input dtype
};
Prices prices(const PlanOptions& options);

/// Bytes by which schedules are compared: those between nodes count nine times. A GPU's link to others of its node is
/// about that much faster than its share of the network (NVLink 4: 450 GB/s a direction; 400 Gbit/s InfiniBand: 50).
constexpr __int128 weighted_bytes(__int128 all, __int128 between_nodes) { return all + 8 * between_nodes; }

/// A candidate to move: rows [begin, end) of a document, for `num_heads` of its key/value heads.
struct Shard {
  int64_t begin = 0, end = 0;
  int64_t num_heads = 0;
  int64_t cost = 0;   // of all its heads
  int64_t bytes = 0;  // where the server holds no key row of the document yet

  bool empty() const { return num_heads == 0; }
  /// Whether this shard brings more cost for a byte, or as much and more cost in all.
  bool better_than(const Shard& other) const;
};

/// Finds shards of documents. Costs are exact integers; a floating-point root is only a first guess.
class ShardFinder {
 public:
  explicit ShardFinder(const PlanOptions& options);

  int64_t cost(const Document& d, int64_t begin, int64_t end) const { return cost_.cost(d, begin, end); }
  int64_t bytes(int64_t num_rows, int64_t num_keys) const {
    return num_rows * prices_.query_row + num_keys * prices_.key_row;
  }
  const Prices& prices() const { return prices_; }

  /// The lowest row a >= begin for which rows [a, end) cost at most `budget`.
  int64_t tail_begin(const Document& d, int64_t begin, int64_t end, int64_t budget) const;
  /// The first of the rows at the end of [begin, end) that bring the most cost for a byte.
  int64_t best_tail(const Document& d, int64_t begin, int64_t end) const;
  /// The cost for 2^20 bytes that the rows of best_tail bring.
  int64_t value(const Document& d, int64_t begin, int64_t end) const;

  /// The shard of rows [begin, end) and up to `num_heads` heads that brings the most cost for a byte, at a cost of at
  /// most `budget`. Neither the shard nor what it leaves of a head's rows has fewer than `min_rows` rows, unless it
  /// leaves none. Empty if there is no such shard.
  Shard best(const Document& d, int64_t begin, int64_t end, int64_t num_heads, int64_t budget, int64_t min_rows) const;
  /// Like `best`, with exactly `num_heads` heads.
  Shard of_heads(const Document& d, int64_t begin, int64_t end, int64_t num_heads, int64_t budget,
                 int64_t min_rows) const;

 private:
  /// The last row a for which rows [a, a + num_rows) cost at most `budget` and leave, on either side, no rows of
  /// [begin, end) or at least `num_rows`; -1 if there is none. [begin, end) has at least 2 * num_rows rows.
  int64_t last_affordable(const Document& d, int64_t begin, int64_t end, int64_t budget, int64_t num_rows) const;
  static bool grows(const Mask& mask, int64_t row) {
    return !mask.is_full() && (mask.window == 0 || row < mask.window);
  }

  CostModel cost_;
  Prices prices_;
  int64_t tail_fraction_ = 0;
};

}  // namespace distca::plan
