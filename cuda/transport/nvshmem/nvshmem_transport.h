// The transport over NVSHMEM. Heap and signal words are symmetric device memory.
//
// On one host whose GPUs load and store each other's memory it is a StreamTransport. Else the host drives it: peers
// that load and store reach get their rows from the put kernel, others packed through the send arena; signals follow on
// the same stream, and the host reads the words that it waits for. NVSHMEM says nothing of a peer's death: between
// hosts it is noticed as silence, after the timeout.
#pragma once

#include <memory>

#include "transport/nvshmem.h"

namespace distca::cuda {

std::unique_ptr<transport::Transport> connect_nvshmem(const transport::NvshmemGroup& group, int64_t heap_bytes,
                                                      int64_t num_signals, std::shared_ptr<Memory> memory,
                                                      std::unique_ptr<transport::Transport> control,
                                                      std::shared_ptr<transport::Streams> streams);

}  // namespace distca::cuda
