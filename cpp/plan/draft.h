// Drafts of a plan: tasks with their arrangements, within a capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {

/// Tasks with their arrangement.
struct Draft {
  std::vector<Task> tasks;
  Arrangement arrangement;
};

/// Throws CapacityError, which names bytes that are enough, unless the arrangement fits.
void check_capacity(const Arrangement& arrangement, int64_t capacity);

/// Returns another draft in the place of one that does not fit. For that, ranks that need too much may compute less for
/// others, and others less for them, again and again until all ranks fit. If no such draft is found, every row is
/// computed at home, unless servers are given. Throws CapacityError where nothing fits.
Draft fit(const Layout& layout, const PlanOptions& options, const Draft& draft);

}  // namespace distca::plan
