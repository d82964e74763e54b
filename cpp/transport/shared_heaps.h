// Heaps of ranks in several processes of one host, whose devices write into each other's memory.
#pragma once

#include <chrono>
#include <memory>

#include "transport/stream_transport.h"

namespace distca::transport {

/// The number of signal words that the control transport needs: the `num_words` of the steps, and those that hand the
/// ranks' memory around.
DISTCA_EXPORT int64_t control_words(int num_ranks, int64_t num_words);

/// Allocates this rank's memory, opens the memory of the others, and makes a StreamTransport of both. `control` is that
/// of StreamTransport, and has `control_words`. Throws InvalidArgumentError on all ranks if their heaps differ in size,
/// PeerDiedError or PeerTimeoutError if ranks do not come, and DeviceError.
DISTCA_EXPORT std::unique_ptr<Transport> share_heaps(const char* name, std::unique_ptr<Transport> control,
                                                     std::shared_ptr<Streams> streams, int64_t heap_bytes,
                                                     int64_t num_words, std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport
