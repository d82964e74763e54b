// Loopback groups whose ranks stand for ranks of several hosts, and ranks that die.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/error.h"
#include "transport/streams.h"
#include "transport/transport.h"

namespace distca::emulation {

/// Does what transport::make_stream_loopback does, but places the ranks on `num_hosts` hosts in turn. Between hosts
/// messages are packed into a send arena of `send_arena_bytes`, and a thread that stands for a network carries them.
/// `streams` are those of make_host_device.
DISTCA_EXPORT std::vector<std::unique_ptr<transport::Transport>> make_loopback_of_hosts(
    int64_t heap_bytes, int64_t num_signals, std::span<const std::shared_ptr<transport::Streams>> streams,
    int num_hosts, int64_t send_arena_bytes);

/// Makes a loopback rank look to its peers as if it had died. Throws InvalidArgumentError for other transports.
DISTCA_EXPORT void mark_died(transport::Transport& transport);

}  // namespace distca::emulation
