// Schedules whose arenas fit into a capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/arrangement.h"
#include "plan/scheduler.h"

namespace distca::plan {

/// A schedule with its arrangement.
struct Draft {
  std::vector<Task> tasks;
  Arrangement arrangement;
};
Draft make_draft(const Layout& layout, const ScheduleOptions& options, const ArrangementOptions& arrangement,
                 const Allowances& allowances = {});

/// A rank's larger arena of the two phases.
int64_t arena_bytes(const Arrangement& arrangement, size_t rank);
/// The rank with the largest arena.
size_t neediest_rank(const Arrangement& arrangement);
/// The bytes of the largest arena.
int64_t slot_bytes(const Arrangement& arrangement);

/// Returns the draft where it fits, and otherwise another draft that does. For that, ranks that need too much may
/// compute less for others, and others less for them, again and again until all ranks fit. If no such draft is found,
/// every row is computed at home, unless servers are given. Throws CapacityError where nothing fits; the error names
/// bytes that are enough.
Draft fit(const Layout& layout, const ScheduleOptions& options, const ArrangementOptions& arrangement, int64_t capacity,
          Draft draft);

/// Throws CapacityError unless the arrangement fits.
void check_capacity(const Arrangement& arrangement, int64_t capacity);

}  // namespace distca::plan
