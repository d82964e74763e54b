// A device without a GPU: two threads that stand for its streams, and the CPU's backend, whose work is queued on one of
// them.
#pragma once

#include <chrono>

#include "runtime/backend.h"

namespace distca::emulation {

/// Makes such a device. What its backend is asked to do happens later, on the stream of the rank's work. It then reads
/// whatever the pointers in its arguments point to at that time; tables are copied. `finish` waits for all of it.
DISTCA_EXPORT runtime::Device make_host_device(std::chrono::milliseconds timeout);

}  // namespace distca::emulation
