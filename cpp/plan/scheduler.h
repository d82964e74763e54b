// The scheduler: cuts documents into tasks and gives every server the same load, moving few bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "plan/cost.h"
#include "plan/layout.h"
#include "plan/shard.h"

namespace distca::plan {

/// Query rows [q_begin, q_end) of a document, all with one home, computed by one server in one go.
struct Task {
  int64_t document = 0;
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_begin = 0, kv_end = 0;            // document rows of the keys that these queries see
  int64_t kv_head_begin = 0, kv_head_end = 0;  // key/value heads, with the query heads that share them
  int64_t home = 0;                            // rank that holds the rows
  int64_t home_row = 0;                        // row of q_begin in the home's token tensor
  int64_t server = 0;                          // rank that computes them

  int64_t num_rows() const { return q_end - q_begin; }
};

struct ScheduleOptions {
  HeadShape heads;
  Mask mask;
  CostModel cost;
  int64_t tolerance_ppm = 50'000;  // the largest load may exceed the mean by this many millionths
  int64_t min_rows = 128;          // no smaller piece is cut off, as long as the tolerance can be met without
  bool balance = true;             // false: every row is computed at home
  bool split_heads = true;         // whether key/value heads of a row may go to different servers
  std::vector<int64_t> servers;    // ranks that compute, ascending; empty: all
  std::vector<int64_t> speeds;     // of every rank; loads are compared after division by it; empty: all the same
  int64_t ranks_per_node = 0;      // neighbours with fast links among them; 0: all ranks
  Objective objective = Objective::kAll;
};

/// By rank: how much of others' rows it may compute, and how much of its own others may; in cost units x groups of
/// heads (limits.h). Empty: any amount.
struct Allowances {
  std::vector<int64_t> in, out;
  // What a rank must keep may be more than the others' limit: whether they may then have as much, or stay at the mean.
  bool level_with_largest = false;
};

/// Every server's load within the tolerance of its share of the mean, or as near as single rows come; with few bytes
/// between nodes, then few bytes. How: balancer.h. A pure function in integers: the same tasks on every machine. Sorted
/// by (server, document, kv_head_begin, q_begin); neighbours on a server are merged; head ranges of the tasks of one
/// document at one server are equal or disjoint.
/// `allowances` are kept, and where they forbid the tolerance, the largest load is about as small as they let it be;
/// ranks that do not serve give all they have in any case.
std::vector<Task> schedule(const Layout& layout, const ScheduleOptions& options, const Allowances& allowances = {});

/// No schedule has a smaller largest load at mean speed, in cost units x query heads: the mean, or the costliest row.
int64_t load_lower_bound(const Layout& layout, const ScheduleOptions& options);

/// No schedule that keeps every load within the tolerance moves fewer bytes under the objective (proof: bounds.cpp).
/// `may_retain`: with keys that need not travel again in backward. 0 where tasks do not cost what their parts do:
/// nothing is proven then.
struct ByteBounds {
  int64_t bytes = 0, between_nodes = 0;
};
ByteBounds byte_lower_bounds(const Layout& layout, const ScheduleOptions& options, bool may_retain);

}  // namespace distca::plan
