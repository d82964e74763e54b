// The CPU's backend, whose work is queued: what a backend of a GPU does, for tests.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "transport/host_streams.h"

namespace distca::runtime {

/// What is asked of it happens later, on the stream of the rank's work, with what pointers in its arguments then point
/// to; tables are copied. `finish` waits.
DISTCA_EXPORT std::shared_ptr<Backend> make_queued_backend(std::shared_ptr<transport::HostStreams> streams);

}  // namespace distca::runtime
