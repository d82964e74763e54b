// Ranks of several processes of one host whose devices write into each other's memory.
#pragma once

#include <chrono>
#include <memory>

#include "transport/stream_transport.h"

namespace distca::transport {

/// Signal words that the transport between the hosts needs beside the `num_words` of the steps, to hand the ranks'
/// memory around.
DISTCA_EXPORT int64_t control_words(int num_ranks, int64_t num_words);

/// Allocates this rank's memory, opens that of the others, and joins them to a transport. `control` is
/// StreamTransport's, with `control_words`. InvalidArgumentError on all ranks where their heaps differ in size;
/// PeerDiedError, PeerTimeoutError where ranks do not come; DeviceError.
DISTCA_EXPORT std::unique_ptr<Transport> share_heaps(const char* name, std::unique_ptr<Transport> control,
                                                     std::shared_ptr<Streams> streams, int64_t heap_bytes,
                                                     int64_t num_words, std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport
