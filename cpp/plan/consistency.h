// Whether the tables of a slice fit together: every result comes from exactly one place, every arena row that is read
// was filled, and no two things share a byte of an arena.
#pragma once

#include "plan/tables.h"

namespace distca::plan {

/// Throws PlanFormatError unless the tables fit together. Indices, rows and offsets of the slice must have been checked
/// against their bounds. What only another rank can know, such as which rows a peer sends here, follows from the
/// digests (tables.h).
void check_consistency(const SliceView& slice);

}  // namespace distca::plan
