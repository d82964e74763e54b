// Fills memory with NaN wherever a step has not written it. No result can then depend on what was there before.
#pragma once

#include "runtime/context.h"

namespace distca::emulation {

/// Called before the first step of a context. From then on its arenas are full of NaN when peers begin to write there,
/// and so are returned tensors when a step begins. Where steps are queued, an arena is filled when the next step begins
/// to use it, and credit is granted after that. Elsewhere a step ends when its results have left, and with a full
/// arena.
DISTCA_EXPORT void fill_with_nan(runtime::Context& context);

}  // namespace distca::emulation
