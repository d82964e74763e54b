#include "emulation/loopback.h"

#include <algorithm>
#include <utility>

#include "emulation/memory_sender.h"
#include "transport/loopback.h"
#include "transport/stream_transport.h"

namespace distca::emulation {

using namespace transport;

std::vector<std::unique_ptr<Transport>> make_loopback_of_hosts(int64_t heap_bytes, int64_t num_signals,
                                                               std::span<const std::shared_ptr<Streams>> streams,
                                                               int num_hosts, int64_t send_arena_bytes) {
  require(num_hosts >= 1 && send_arena_bytes >= 0, "loopback: ", num_hosts, " hosts, a send arena of ",
          send_arena_bytes, " bytes");
  const auto num_ranks = static_cast<int>(streams.size());
  std::vector<std::unique_ptr<Transport>> ranks = make_loopback(num_ranks, 0, num_signals);
  const DeviceHeaps all = allocate_heaps(heap_bytes, num_signals, streams);
  for (int r = 0; r < num_ranks; ++r) {
    const auto i = static_cast<size_t>(r);
    DeviceHeaps heaps = all;
    for (int p = 0; p < num_ranks; ++p)
      if (p % num_hosts != r % num_hosts) heaps.ranks[static_cast<size_t>(p)] = {};
    if (num_hosts > 1) {
      const std::shared_ptr<std::byte> arena = streams[i]->allocate(std::max<int64_t>(send_arena_bytes, 1));
      heaps.send_arena = {arena.get(), static_cast<size_t>(send_arena_bytes)};
      heaps.owner = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<std::byte>>>(all.owner, arena);
      heaps.sender = make_memory_sender(r, all.ranks);
    }
    ranks[i] = std::make_unique<StreamTransport>("loopback", std::move(ranks[i]), streams[i], std::move(heaps));
  }
  return ranks;
}

void mark_died(Transport& transport) {
  auto* const wrapper = dynamic_cast<WrappingTransport*>(&transport);
  require(transport::mark_died(wrapper == nullptr ? transport : wrapper->inner()),
          "only a loopback rank can be marked as died, not one of a ", transport.name(), " transport");
}

}  // namespace distca::emulation
