// Drafts of a plan: schedules with their arrangements, within a capacity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {

/// A schedule with its arrangement.
struct Draft {
  std::vector<Task> tasks;
  Arrangement arrangement;
  int64_t slot_bytes = 0;  // the largest arena of any rank and phase
  // Of the draft that would be made without a capacity: its largest arena, and the rank that has it.
  int64_t wanted_slot_bytes = 0, neediest_rank = 0;
};

/// Schedules and arranges, within the capacity. Throws CapacityError where nothing fits; the error names bytes that are
/// enough.
Draft make_draft(const Layout& layout, const PlanOptions& options);
/// Arranges given tasks. Throws InvalidArgumentError unless they compute everything once, and CapacityError where they
/// do not fit.
Draft make_draft(const Layout& layout, const PlanOptions& options, std::span<const GivenTask> given);

}  // namespace distca::plan
