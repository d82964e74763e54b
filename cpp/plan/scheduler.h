// The scheduler: cuts documents into tasks and gives every server the same load, moving few bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "plan/cost.h"
#include "plan/layout.h"

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
  int64_t min_rows = 64;           // no smaller piece is cut off, as long as the tolerance can be met without
  bool balance = true;             // false: every row is computed at home
  std::vector<int64_t> servers;    // ranks that compute, ascending; empty: all
  int64_t ranks_per_node = 0;      // neighbours with fast links among them; 0: all ranks
};

/// The paper's communication-aware greedy (section 4.2): from the server with the largest load, again and again, the
/// piece that lightens it most for each byte moved, to a server below the mean; until the *largest* load is within
/// tolerance, or no single row can be moved with gain. Integers only: the same tasks on every machine. Sorted by
/// (server, document, q_begin); neighbours on a server are merged.
std::vector<Task> schedule(const Layout& layout, const ScheduleOptions& options);

/// No schedule of whole rows has a smaller largest load: the mean rounded up, or the costliest single row.
int64_t load_lower_bound(const Layout& layout, const Mask& mask, const CostModel& cost, int64_t num_servers);

}  // namespace distca::plan
