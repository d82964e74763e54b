// A transport whose puts are made by a thread of its own, so that rows travel while their rank computes.
#pragma once

#include <memory>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

/// Hands puts and signals of another transport, in their order, to a thread that makes them; all else is done at once
/// by the caller. The other transport must let one thread put and signal while another does the rest, as shared memory
/// does. What is not made yet when this is destroyed is made then.
DISTCA_EXPORT std::unique_ptr<Transport> make_background(std::unique_ptr<Transport> inner);

}  // namespace distca::transport
