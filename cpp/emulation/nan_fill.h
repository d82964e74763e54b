// Fills memory with NaN wherever a step has not written it. No result can then depend on what was there before.
#pragma once

#include "runtime/context.h"

namespace distca::emulation {

/// Called before the first step of a context. From then on its arenas are full of NaN when peers begin to write there,
/// and so are returned tensors when a step begins. An arena is filled at the end of its use, so that credit is granted
/// at the same time as without this.
DISTCA_EXPORT void fill_with_nan(runtime::Context& context);

}  // namespace distca::emulation
