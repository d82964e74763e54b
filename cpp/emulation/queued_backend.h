// A device without a GPU: two threads that stand for its streams, and the CPU's backend, whose work is queued on one of
// them.
#pragma once

#include <chrono>

#include "runtime/backend.h"

namespace distca::emulation {

/// What is asked of its backend happens later, on the stream of the rank's work, with what pointers in its arguments
/// then point to; tables are copied. `finish` waits.
DISTCA_EXPORT runtime::Device make_host_device(std::chrono::milliseconds timeout);

}  // namespace distca::emulation
