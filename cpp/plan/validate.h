// Whether a plan tensor may be trusted. After `validate`, every index, row and offset in it is inside its bounds, and
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

/// Throws PlanFormatError unless the words are a whole, unaltered slice of this format. Returns its checksum, by which
/// a slice can be known again. Reads each word once and allocates nothing.
DISTCA_EXPORT int64_t check_unaltered(std::span<const int64_t> words);

/// Does what check_unaltered does, and also throws PlanFormatError for tables that are not consistent or are not those
/// of the plan's digest. Allocates less memory than the slice has.
DISTCA_EXPORT void validate(std::span<const int64_t> words);

}  // namespace distca::plan
