// A transport over a collective. Puts and signals are held back until all ranks exchange them.
//
// It is for ranks that share no memory, on any number of hosts. The function that swaps the bytes is given from
// outside: for `transport="torch"` it is all_to_all_single of torch.distributed.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

/// The operations that a group of ranks does together.
struct Collective {
  const char* name = "collective";
  /// Sends `send_bytes[p]` bytes to every rank p and receives `receive_bytes[p]` from it. The parts lie one after
  /// another in `send` and `receive`. All ranks call it. Throws PeerDiedError or PeerTimeoutError, which name the
  /// missing rank.
  std::function<void(std::span<std::byte> send, std::span<const int64_t> send_bytes, std::span<std::byte> receive,
                     std::span<const int64_t> receive_bytes)>
      all_to_all;
  /// Leaves the group after a fault, so that peers that wait for this rank learn of it.
  std::function<void(const Error& why)> abandon;
};

/// Makes a rank's transport. All ranks must give the same sizes.
DISTCA_EXPORT std::unique_ptr<Transport> make_collective(int rank, int num_ranks, int64_t heap_bytes,
                                                         int64_t num_signals, Collective collective);

}  // namespace distca::transport
