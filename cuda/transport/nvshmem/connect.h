// The transport over NVSHMEM: a StreamTransport whose heaps and signal words are symmetric device memory. The put
// kernel writes rows to peers that load and store reach. Rows for other peers are packed into a send arena and sent
// (sender.h).
#pragma once

#include <memory>

#include "transport/nvshmem.h"

namespace distca::cuda {

std::unique_ptr<transport::Transport> connect_nvshmem(const transport::NvshmemGroup& group, int64_t heap_bytes,
                                                      int64_t num_signals, int64_t send_arena_bytes,
                                                      std::unique_ptr<transport::Transport> control,
                                                      std::shared_ptr<transport::Streams> streams);

}  // namespace distca::cuda
