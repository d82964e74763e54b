// Puts and signals through NVSHMEM to peers that load and store do not reach.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "transport/guard.h"
#include "transport/send_table.h"

namespace distca::cuda {

using transport::Guard;

/// Sends pieces of `from` to `to` at the peer, then writes its signal. Offsets are those of the pieces.
struct RemoteMessage {
  int32_t peer;
  const SendPiece* pieces;  // device memory
  int32_t num_pieces;
  const std::byte* from;  // send arena
  std::byte* to;          // heap; an address of this rank's own
  uint64_t* signal;       // null: none is written
  uint64_t signal_value;
};
void send(const RemoteMessage& message, const Guard& guard, cudaStream_t stream);

}  // namespace distca::cuda
