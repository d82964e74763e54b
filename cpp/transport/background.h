// A transport whose puts are made by a thread of its own. Rows thus travel while their rank computes.
#pragma once

#include <memory>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

/// Hands the puts and signals of another transport, in their order, to a thread that makes them. The caller does all
/// else at once. The other transport must let one thread put and signal while another does the rest, as shared memory
/// does. Puts and signals that are not made when this transport is destroyed are made then.
DISTCA_EXPORT std::unique_ptr<Transport> make_background(std::unique_ptr<Transport> inner);

}  // namespace distca::transport
