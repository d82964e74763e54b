// Loopback has all ranks in one process, each used from a thread of its own. It serves tests and groups of one rank.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/memory.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace distca::transport {

/// Makes the transports of ranks 0 .. num_ranks-1. They share their memory; therefore each may be destroyed at any
/// time, which the others see as an orderly departure. `memories` has one entry for each rank and says where its heap
/// and rows lie; if it is empty, they lie on the host. A signal is sent when everything that its rank's memory was
/// asked to do is done.
DISTCA_EXPORT std::vector<std::unique_ptr<Transport>> make_loopback(
    int num_ranks, int64_t heap_bytes, int64_t num_signals, std::span<const std::shared_ptr<Memory>> memories = {});

/// Makes the transports of ranks on devices of one process: each rank has its streams, and rows travel by them.
DISTCA_EXPORT std::vector<std::unique_ptr<Transport>> make_stream_loopback(
    int64_t heap_bytes, int64_t num_signals, std::span<const std::shared_ptr<Streams>> streams);

/// For tests: makes a loopback rank look to its peers as if it had died. For other transports it does nothing and
/// returns false.
DISTCA_EXPORT bool mark_died(Transport& transport);

}  // namespace distca::transport
