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
/// That arena.
int64_t slot_bytes(const Arrangement& arrangement);

/// The draft itself where it fits. Else one that does: ranks that need too much may do less for others and have less
/// done by them, again and again until all fit; at last every row is computed at home. CapacityError where not even
/// that fits; it names bytes that are enough.
Draft fit(const Layout& layout, const ScheduleOptions& options, const ArrangementOptions& arrangement, int64_t capacity,
          Draft draft);

/// CapacityError unless the arrangement fits.
void check_capacity(const Arrangement& arrangement, int64_t capacity);

}  // namespace distca::plan
