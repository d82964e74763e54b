#include "transport/shm.h"

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/host_memory.h"
#include "transport/shm_mesh.h"

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

class ShmTransport final : public HostTransport {
 public:
  ShmTransport(int rank, std::vector<Region> regions, std::vector<Mapping> memory, std::vector<Descriptor> sockets)
      : HostTransport(rank, std::move(regions)),
        memory_(std::move(memory)),
        sockets_(std::move(sockets)),
        hung_up_(sockets_.size(), false) {}
  ~ShmTransport() override { leave(RankState::kClosed); }

  const char* name() const override { return "shm"; }

 protected:
  // Asks the kernel at most once a millisecond, so that polling for departures costs no more than reading a clock.
  void refresh_states() const override {
    const Clock::time_point now = Clock::now();
    if (now < next_poll_) return;
    next_poll_ = now + std::chrono::milliseconds(1);
    polled_.clear();
    for (size_t i = 0; i < sockets_.size(); ++i)
      polled_.push_back({.fd = hung_up_[i] ? -1 : sockets_[i].get(), .events = POLLRDHUP, .revents = 0});
    if (::poll(polled_.data(), polled_.size(), 0) <= 0) return;
    for (size_t i = 0; i < polled_.size(); ++i) {
      if (polled_[i].revents != 0) hung_up_[i] = true;
    }
  }

  // A rank that leaves in order says so in its region before it hangs up.
  RankState state_of(int peer) const override {
    const RankState said = region(peer).state();
    return said == RankState::kPresent && hung_up_[static_cast<size_t>(peer)] ? RankState::kDied : said;
  }

 private:
  std::vector<Mapping> memory_;
  std::vector<Descriptor> sockets_;  // one for each rank; the own one is empty
  mutable std::vector<bool> hung_up_;
  mutable std::vector<pollfd> polled_;
  mutable Clock::time_point next_poll_{};
};

/// Parses the addresses, and checks that all of them can be reached from here.
std::vector<shm::Address> check_addresses(const shm::Listener& listener, int rank,
                                          std::span<const std::string> addresses) {
  const int num_ranks = static_cast<int>(addresses.size());
  require(rank >= 0 && rank < num_ranks, "rank ", rank, " is not one of ", num_ranks, " ranks");
  const shm::Address& own = listener.address;
  std::vector<shm::Address> parsed;
  for (int i = 0; i < num_ranks; ++i) {
    const shm::Address& a = parsed.emplace_back(shm::Address::parse(addresses[static_cast<size_t>(i)]));
    require(a.boot_id == own.boot_id, "the shm transport needs all ranks on one host; rank ", i,
            " runs on another than rank ", rank, " (boot id ", a.boot_id, ", here ", own.boot_id, ")");
    require(a.network == own.network, "the shm transport needs all ranks in one network namespace; rank ", i,
            " runs in ", a.network, ", rank ", rank, " in ", own.network);
  }
  require(parsed[static_cast<size_t>(rank)].token == own.token, "the address of rank ", rank,
          " is not the one of this rank's listener");
  return parsed;
}

}  // namespace

ShmListener::ShmListener() : listener_(std::make_unique<shm::Listener>()) {}
ShmListener::~ShmListener() = default;
ShmListener::ShmListener(ShmListener&&) noexcept = default;
ShmListener& ShmListener::operator=(ShmListener&&) noexcept = default;

std::string ShmListener::address() const {
  require(listener_ != nullptr, "this listener has been used up");
  return listener_->address.to_string();
}

bool can_share_memory(std::span<const std::string> addresses) {
  if (addresses.empty()) return true;
  const shm::Address first = shm::Address::parse(addresses.front());
  return std::all_of(addresses.begin(), addresses.end(), [&](const std::string& text) {
    const shm::Address other = shm::Address::parse(text);
    return other.boot_id == first.boot_id && other.network == first.network;
  });
}

std::unique_ptr<Transport> connect_shm(ShmListener&& from, int rank, std::span<const std::string> addresses,
                                       int64_t heap_bytes, int64_t num_signals, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  const std::unique_ptr<shm::Listener> listener = std::move(from.listener_);
  require(listener != nullptr, "this listener has been used up");
  require(static_cast<bool>(listener->socket),
          "this listener was made before the process was forked; make it afterwards");
  check_region_sizes(heap_bytes, num_signals);
  const shm::Group group{.rank = rank,
                         .addresses = check_addresses(*listener, rank, addresses),
                         .heap_bytes = heap_bytes,
                         .num_signals = num_signals};
  const int64_t bytes = region_bytes(heap_bytes, num_signals);
  const Descriptor own = shm::make_memory(bytes);
  std::vector<shm::Peer> peers = shm::connect_mesh(*listener, group, own, deadline);

  std::vector<Mapping> memory;
  std::vector<Region> regions;
  std::vector<Descriptor> sockets;
  for (int i = 0; i < group.num_ranks(); ++i) {
    shm::Peer& peer = peers[static_cast<size_t>(i)];
    memory.push_back(Mapping::shared(i == rank ? own.get() : peer.memory.get(), bytes));
    regions.emplace_back(memory.back().data(), heap_bytes, num_signals);
    sockets.push_back(std::move(peer.socket));
  }
  return std::make_unique<ShmTransport>(rank, std::move(regions), std::move(memory), std::move(sockets));
}

}  // namespace distca::transport
