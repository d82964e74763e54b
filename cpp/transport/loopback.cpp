#include "transport/loopback.h"

#include <utility>

#include "transport/host_memory.h"

namespace distca::transport {
namespace {

class LoopbackTransport final : public HostTransport {
 public:
  LoopbackTransport(int rank, std::vector<Region> regions, std::shared_ptr<const std::vector<Mapping>> memory)
      : HostTransport(rank, std::move(regions)), memory_(std::move(memory)) {}
  ~LoopbackTransport() override {
    if (!died_) leave(RankState::kClosed);
  }

  const char* name() const override { return "loopback"; }
  void die() {
    died_ = true;
    leave(RankState::kDied);
  }

 private:
  std::shared_ptr<const std::vector<Mapping>> memory_;
  bool died_ = false;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_loopback(int num_ranks, int64_t heap_bytes, int64_t num_signals) {
  require(num_ranks >= 1, "loopback needs at least one rank, not ", num_ranks);
  check_region_sizes(heap_bytes, num_signals);
  auto memory = std::make_shared<std::vector<Mapping>>();
  std::vector<Region> regions;
  for (int i = 0; i < num_ranks; ++i) {
    memory->push_back(Mapping::anonymous(region_bytes(heap_bytes, num_signals)));
    regions.emplace_back(memory->back().data(), heap_bytes, num_signals);
  }
  std::vector<std::unique_ptr<Transport>> ranks;
  for (int i = 0; i < num_ranks; ++i) ranks.push_back(std::make_unique<LoopbackTransport>(i, regions, memory));
  return ranks;
}

void mark_died(Transport& transport) {
  auto* const loopback = dynamic_cast<LoopbackTransport*>(&transport);
  require(loopback != nullptr, "only a loopback rank can be marked as died, not one of a ", transport.name(),
          " transport");
  loopback->die();
}

}  // namespace distca::transport
