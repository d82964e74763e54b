// Whether a plan tensor may be trusted: after `validate`, every index, row and offset in it is inside its bounds.
#pragma once

#include <cstdint>
#include <span>

#include "common/error.h"
#include "plan/tables.h"

namespace distca::plan {

/// Throws PlanFormatError for words that are not a whole, unaltered, consistent slice. Reads each word once or twice
/// and allocates nothing.
DISTCA_EXPORT void validate(std::span<const int64_t> words);

}  // namespace distca::plan
