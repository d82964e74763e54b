// Shared memory between processes of one host.
//
// Every rank makes its region as a memfd, which has no name anywhere. It passes it to each peer over a Unix socket of
// the abstract namespace, which leaves no file. These connections then stay open and carry nothing; when the other end
// hangs up, that is the news of its death. However a process ends, the kernel frees all of this.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

namespace shm {
struct Listener;
}

/// The place where the peers of a rank find it. Make one, exchange the addresses by any channel, then call
/// `connect_shm`.
class DISTCA_EXPORT ShmListener {
 public:
  ShmListener();
  ~ShmListener();
  ShmListener(ShmListener&&) noexcept;
  ShmListener& operator=(ShmListener&&) noexcept;

  /// The address as printable text without spaces. It is a secret, because whoever knows it may join the group (as the
  /// same user).
  std::string address() const;

 private:
  friend DISTCA_EXPORT std::unique_ptr<Transport> connect_shm(ShmListener&&, int, std::span<const std::string>, int64_t,
                                                              int64_t, std::chrono::milliseconds);
  std::unique_ptr<shm::Listener> listener_;
};

/// Whether ranks that listen at these addresses can reach each other through shared memory. Throws InvalidArgumentError
/// if one is no address.
DISTCA_EXPORT bool can_share_memory(std::span<const std::string> addresses);

/// Connects the ranks that listen at `addresses` (one for each rank, this rank's own among them) to each other. All of
/// them must call it with the same addresses and sizes. The listener is used up.
///
/// Throws InvalidArgumentError if ranks disagree, or if an address is not one or lies on another host; PeerDiedError if
/// a rank has gone; PeerTimeoutError, which names the missing ranks, after `timeout`; OperatingSystemError.
DISTCA_EXPORT std::unique_ptr<Transport> connect_shm(ShmListener&& listener, int rank,
                                                     std::span<const std::string> addresses, int64_t heap_bytes,
                                                     int64_t num_signals, std::chrono::milliseconds timeout);

}  // namespace distca::transport
