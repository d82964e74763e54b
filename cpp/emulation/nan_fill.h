// Memory that is full of NaN wherever a step has not written it, so that no result depends on what was there before.
#pragma once

#include "runtime/context.h"

namespace distca::emulation {

/// Before the first step of a context: from here on its arenas are full of NaN whenever peers begin to write there, and
/// returned tensors when a step begins. An arena is filled at the end of its use, so that credit is granted when it is
/// without this.
DISTCA_EXPORT void fill_with_nan(runtime::Context& context);

}  // namespace distca::emulation
