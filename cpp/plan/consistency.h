// Whether the tables of a slice fit together: every result comes from exactly one place, every row in the arena that is
// read was filled, and no two things share a byte there.
#pragma once

#include "plan/tables.h"

namespace distca::plan {

/// Throws PlanFormatError unless they do. The slice's indices, rows and offsets are known to be inside their bounds.
/// What only another rank can know, such as which rows a peer sends here, follows from the digests (digests.h).
void check_consistency(const SliceView& slice);

}  // namespace distca::plan
