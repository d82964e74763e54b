// Here the ranks of a shared memory transport find, check and connect to each other.
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

/// This rank's place in the group, and what all ranks must agree on.
struct Group {
  int rank = 0;
  std::vector<Address> addresses;  // one for each rank
  int64_t heap_bytes = 0;
  int64_t num_signals = 0;

  int num_ranks() const { return static_cast<int>(addresses.size()); }
};

struct Peer {
  Descriptor socket;
  Descriptor memory;  // its region; size and seals are checked
};

/// Makes a sealed memfd of that size.
DISTCA_EXPORT Descriptor make_memory(int64_t bytes);

/// Connects to every lower rank, accepts every higher one, and exchanges regions. Returns one entry for each rank; the
/// own one is empty.
std::vector<Peer> connect_mesh(const Listener& listener, const Group& group, const Descriptor& memory,
                               std::chrono::steady_clock::time_point deadline);

}  // namespace distca::transport::shm
