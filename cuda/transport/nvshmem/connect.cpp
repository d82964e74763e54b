#include "transport/nvshmem/connect.h"

#include <nvshmem_host.h>
#include <nvshmemx.h>

#include <utility>

#include "common/align.h"
#include "runtime/check.h"
#include "transport/nvshmem/sender.h"
#include "transport/nvshmem/world.h"
#include "transport/stream_transport.h"

namespace distca::cuda {
std::unique_ptr<transport::Transport> connect_nvshmem(const transport::NvshmemGroup& group, int64_t heap_bytes,
                                                      int64_t num_signals, int64_t send_arena_bytes,
                                                      std::unique_ptr<transport::Transport> control,
                                                      std::shared_ptr<transport::Streams> streams) {
  require<DeviceError>(streams != nullptr, "transport 'nvshmem' needs libdistca_cuda, which is not there");
  const int64_t words_bytes = round_up(num_signals * 8, kPageBytes);
  const std::span<std::byte> own = allocate_symmetric(words_bytes + round_up(heap_bytes, kPageBytes));
  transport::DeviceHeaps heaps{.ranks = {}, .heap_bytes = heap_bytes, .num_words = num_signals, .owner = nullptr};
  bool reaches_all = true;
  for (int p = 0; p < group.num_ranks; ++p) {
    auto* const base = static_cast<std::byte*>(nvshmem_ptr(own.data(), p));
    reaches_all = reaches_all && base != nullptr;
    if (base == nullptr)
      heaps.ranks.emplace_back();
    else
      heaps.ranks.push_back({base + words_bytes, reinterpret_cast<uint64_t*>(base)});
  }
  // A wait sees the word that the network has written, and kernels then read the rows that it has written before.
  int ordering = 0;
  check(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, group.device), "asking the device");
  const bool keeps_order = reaches_all || ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
  require<DeviceError>(
      !is_so_on_any_rank(!keeps_order), "transport 'nvshmem' between hosts needs GPUs for which the ",
      "order of a network's writes holds without a flush; ",
      keeps_order ? "that of another rank does not say so" : message("device ", group.device, " does not say so"));
  // The send arena is symmetric too, because a network registers no other memory. Therefore all ranks have one, or none
  // has.
  if (is_so_on_any_rank(!reaches_all)) heaps.send_arena = allocate_symmetric(round_up(send_arena_bytes, kPageBytes));
  if (!reaches_all) heaps.sender = make_nvshmem_sender();
  return std::make_unique<transport::StreamTransport>("nvshmem", std::move(control), std::move(streams),
                                                      std::move(heaps));
}

}  // namespace distca::cuda
