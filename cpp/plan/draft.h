// Drafts of a plan: tasks with their arrangements, within a capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/arrangement.h"
#include "plan/scheduler.h"

namespace distca::plan {

/// Tasks with their arrangement.
struct Draft {
  std::vector<Task> tasks;
  Arrangement arrangement;
  Approach approach;
  Allowances exchanged;           // what balancing moved
  int64_t wanted_slot_bytes = 0;  // the largest arena without a capacity, which is that of neediest_rank
  int64_t neediest_rank = 0;
};

/// Throws CapacityError, which names bytes that are enough, unless the arrangement fits.
void check_capacity(const Arrangement& arrangement, int64_t capacity);

/// Makes the tasks of a plan. Where it pays, ranks that hold a document together exchange its rows for heads; the
/// balanced draft that moves fewer bytes is taken.
///
/// If no draft fits into the capacity, ranks that need too much may compute less for others, and others less for them,
/// again and again until all ranks fit. If no such draft is found, nothing is balanced, unless servers are given.
/// Throws CapacityError where nothing fits.
Draft make_draft(const Layout& layout, const PlanOptions& options);

}  // namespace distca::plan
