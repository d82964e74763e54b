// Here the ranks of a TCP transport find, check and connect to each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "common/fork_guard.h"
#include "transport/tcp_address.h"

namespace distca::transport::tcp {

struct Listener {
  /// Listens at that numeric address of this host, with a port that the system chooses. Throws InvalidArgumentError,
  /// OperatingSystemError.
  explicit Listener(const std::string& host);

  Address address;
  Descriptor socket;
};

/// This rank's place in the group, and what all ranks must agree on.
struct Group {
  int rank = 0;
  std::vector<Address> addresses;  // one for each rank
  int64_t num_signals = 0;
  std::chrono::milliseconds silence{};  // a host from which nothing comes for this time counts as dead

  int num_ranks() const { return static_cast<int>(addresses.size()); }
};

/// Connects to every lower rank, and accepts every higher one that shows this rank's token. Returns one socket for each
/// rank, which does not block; the own one is empty.
std::vector<Descriptor> connect_mesh(const Listener& listener, const Group& group,
                                     std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport::tcp
