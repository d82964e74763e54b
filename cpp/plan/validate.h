// Whether a plan tensor may be trusted: after `validate`, every index, row and offset in it is inside its bounds, and
// its tables fit together.
#pragma once

#include <cstdint>
#include <span>

#include "common/error.h"
#include "plan/tables.h"

namespace distca::plan {

template <class... Args>
void check_plan(bool condition, const Args&... args) {
  require<PlanFormatError>(condition, "plan tensor: ", args...);
}

/// Throws PlanFormatError for words that are not a whole, unaltered slice of this format. Returns its checksum, which
/// is that of no other slice. Reads each word once and allocates nothing.
DISTCA_EXPORT int64_t check_unaltered(std::span<const int64_t> words);

/// Throws PlanFormatError also for tables that are not consistent, or not those that the digest of the plan is of.
/// Allocates less than the slice has words.
DISTCA_EXPORT void validate(std::span<const int64_t> words);

}  // namespace distca::plan
