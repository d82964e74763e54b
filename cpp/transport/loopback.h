// Loopback: all ranks in one process, each used from a thread of its own. For tests, and for a group of one rank.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/memory.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace distca::transport {

/// Makes the transports of ranks 0 .. num_ranks-1. They share their memory, so each may be destroyed at any time; to
/// the others that is an orderly departure. `memories` says where the ranks' heaps and rows lie, one for each rank; on
/// the host where there are none. A signal is sent when all that its rank's memory was asked to do is done.
DISTCA_EXPORT std::vector<std::unique_ptr<Transport>> make_loopback(
    int num_ranks, int64_t heap_bytes, int64_t num_signals, std::span<const std::shared_ptr<Memory>> memories = {});

/// As ranks on devices of one process do it: each has its streams, and rows go by them.
DISTCA_EXPORT std::vector<std::unique_ptr<Transport>> make_stream_loopback(
    int64_t heap_bytes, int64_t num_signals, std::span<const std::shared_ptr<Streams>> streams);

/// For tests: makes a loopback rank look to its peers as if it had died. False, and nothing happens, for other
/// transports.
DISTCA_EXPORT bool mark_died(Transport& transport);

}  // namespace distca::transport
