// Shared memory between processes of one host.
//
// Every rank makes its region as a memfd, which has no name anywhere, and passes it to each peer over a Unix socket of
// the abstract namespace, which leaves no file. These connections then stay open and carry nothing: that the other end
// hangs up is the news of its death. Whatever way a process ends, the kernel frees all of it.
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

/// Where the peers of one rank find it. Make one, exchange the addresses by any channel, then call `connect_shm`.
class DISTCA_EXPORT ShmListener {
 public:
  ShmListener();
  ~ShmListener();
  ShmListener(ShmListener&&) noexcept;
  ShmListener& operator=(ShmListener&&) noexcept;

  /// Printable, without spaces. Who knows it may join the group (as the same user), so it is a secret.
  std::string address() const;

 private:
  friend DISTCA_EXPORT std::unique_ptr<Transport> connect_shm(ShmListener&&, int, std::span<const std::string>, int64_t,
                                                              int64_t, std::chrono::milliseconds);
  std::unique_ptr<shm::Listener> listener_;
};

/// Whether ranks that listen at these addresses can reach each other through shared memory. Throws InvalidArgumentError
/// for what is no address.
DISTCA_EXPORT bool can_share_memory(std::span<const std::string> addresses);

/// Connects the ranks that listen at `addresses` (one a rank, this rank's own among them) to each other. All of them
/// must call it with the same addresses and sizes. The listener is used up.
///
/// Throws InvalidArgumentError where ranks disagree, an address is not one, or lies on another host; PeerDiedError
/// where a rank has gone; PeerTimeoutError, with the ranks that are missing, after `timeout`; OperatingSystemError.
DISTCA_EXPORT std::unique_ptr<Transport> connect_shm(ShmListener&& listener, int rank,
                                                     std::span<const std::string> addresses, int64_t heap_bytes,
                                                     int64_t num_signals, std::chrono::milliseconds timeout);

}  // namespace distca::transport
