// Ranks of several processes of one host whose devices write into each other's memory.
#pragma once

#include <chrono>
#include <memory>

#include "transport/stream_transport.h"

namespace distca::transport {

/// Heap bytes that the transport between the hosts needs, to hand the ranks' memory around.
DISTCA_EXPORT int64_t control_heap_bytes(int num_ranks);

/// Allocates this rank's memory, opens that of the others, and joins them to a transport. All ranks call it with the
/// same sizes. `control` is StreamTransport's. PeerDiedError, PeerTimeoutError where ranks do not come; DeviceError.
DISTCA_EXPORT std::unique_ptr<Transport> share_heaps(const char* name, std::unique_ptr<Transport> control,
                                                     std::shared_ptr<Streams> streams, int64_t heap_bytes,
                                                     int64_t num_words, std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport
