#include "transport/loopback.h"

#include <algorithm>
#include <utility>

#include "transport/host_memory.h"
#include "transport/stream_transport.h"

namespace distca::transport {
namespace {

/// The memory that the ranks share: their signals, and the heaps that do not lie beside them.
struct Shared {
  std::vector<Mapping> mappings;
  std::vector<std::shared_ptr<std::byte>> heaps;
};

class LoopbackTransport final : public HostTransport {
 public:
  LoopbackTransport(int rank, std::vector<Region> regions, std::shared_ptr<const Shared> shared,
                    std::shared_ptr<Memory> memory)
      : HostTransport(rank, std::move(regions)), shared_(std::move(shared)), memory_(std::move(memory)) {}
  ~LoopbackTransport() override {
    if (!died_) leave(RankState::kClosed);
  }

  const char* name() const override { return "loopback"; }
  bool copies_in_put() const override { return memory_ == nullptr; }
  void signal(int peer, int64_t word, uint64_t value) override {
    if (memory_) memory_->finish();
    HostTransport::signal(peer, word, value);
  }
  void die() {
    died_ = true;
    leave(RankState::kDied);
  }

 protected:
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    if (memory_)
      memory_->copy(to, from, n);
    else
      copy_rows(to, from, n);
  }

 private:
  std::shared_ptr<const Shared> shared_;
  std::shared_ptr<Memory> memory_;  // null: the host's
  bool died_ = false;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_loopback(int num_ranks, int64_t heap_bytes, int64_t num_signals,
                                                      std::span<const std::shared_ptr<Memory>> memories) {
  require(num_ranks >= 1, "loopback needs at least one rank, not ", num_ranks);
  check_region_sizes(heap_bytes, num_signals);
  require(memories.empty() || static_cast<int>(memories.size()) == num_ranks, "loopback: ", memories.size(),
          " memories for ", num_ranks, " ranks");
  const auto memory_of = [&](int rank) { return memories.empty() ? nullptr : memories[static_cast<size_t>(rank)]; };
  auto shared = std::make_shared<Shared>();
  std::vector<Region> regions;
  for (int i = 0; i < num_ranks; ++i) {
    const std::shared_ptr<Memory> memory = memory_of(i);
    shared->mappings.push_back(Mapping::anonymous(region_bytes(memory ? 0 : heap_bytes, num_signals)));
    std::byte* const base = shared->mappings.back().data();
    if (!memory) {
      regions.emplace_back(base, heap_bytes, num_signals);
      continue;
    }
    shared->heaps.push_back(memory->allocate(heap_bytes));
    regions.emplace_back(base, num_signals, std::span(shared->heaps.back().get(), static_cast<size_t>(heap_bytes)));
  }
  std::vector<std::unique_ptr<Transport>> ranks;
  for (int i = 0; i < num_ranks; ++i)
    ranks.push_back(std::make_unique<LoopbackTransport>(i, regions, shared, memory_of(i)));
  return ranks;
}

std::vector<std::unique_ptr<Transport>> make_stream_loopback(int64_t heap_bytes, int64_t num_signals,
                                                             std::span<const std::shared_ptr<Streams>> streams) {
  std::vector<std::unique_ptr<Transport>> ranks = make_loopback(static_cast<int>(streams.size()), 0, num_signals);
  const DeviceHeaps heaps = allocate_heaps(heap_bytes, num_signals, streams);
  for (size_t i = 0; i < ranks.size(); ++i)
    ranks[i] = std::make_unique<StreamTransport>("loopback", std::move(ranks[i]), streams[i], heaps);
  return ranks;
}

bool mark_died(Transport& transport) {
  auto* const loopback = dynamic_cast<LoopbackTransport*>(&transport);
  if (loopback != nullptr) loopback->die();
  return loopback != nullptr;
}

}  // namespace distca::transport
