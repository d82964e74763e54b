// The transport over NVSHMEM: a StreamTransport whose heaps and signal words are symmetric device memory. Peers that
// load and store reach get their rows from the put kernel, others packed through a send arena (sender.h).
#pragma once

#include <memory>

#include "transport/nvshmem.h"

namespace distca::cuda {

std::unique_ptr<transport::Transport> connect_nvshmem(const transport::NvshmemGroup& group, int64_t heap_bytes,
                                                      int64_t num_signals, int64_t send_arena_bytes,
                                                      std::unique_ptr<transport::Transport> control,
                                                      std::shared_ptr<transport::Streams> streams);

}  // namespace distca::cuda
