// How the ranks of a shared memory transport find, check and connect to each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "common/error.h"
#include "common/fork_guard.h"
#include "transport/shm_address.h"

namespace distca::transport::shm {

struct Listener {
  Listener();

  Address address;
  Descriptor socket;
};

/// Where this rank stands in the group, and what all ranks must agree on.
struct Group {
  int rank = 0;
  std::vector<Address> addresses;  // one a rank
  int64_t heap_bytes = 0;
  int64_t num_signals = 0;

  int num_ranks() const { return static_cast<int>(addresses.size()); }
};

struct Peer {
  Descriptor socket;
  Descriptor memory;  // its region; size and seals are checked
};

/// A sealed memfd of that size.
DISTCA_EXPORT Descriptor make_memory(int64_t bytes);

/// Connects to every lower rank, accepts every higher one, and exchanges regions. One entry a rank, the own one empty.
std::vector<Peer> connect_mesh(const Listener& listener, const Group& group, const Descriptor& memory,
                               std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport::shm
