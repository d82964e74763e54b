// Signals and published words between hosts, over TCP. This is a control transport, which has no heap.
//
// Every rank keeps its own words. A signal is one message. A peek is a question to the peer, answered by the thread
// that every rank has for its connections. A peer that closes says goodbye first; a hang-up without a goodbye is the
// news of its death.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "common/error.h"
#include "transport/transport.h"

namespace distca::transport {

namespace tcp {
struct Listener;
}

/// The place where the peers of a rank find it. Make one, exchange the addresses by any channel, then call
/// `connect_tcp`.
class DISTCA_EXPORT TcpListener {
 public:
  /// Listens at that address of this host alone, with a port that the system chooses. The address must be numeric, IPv4
  /// or IPv6. Throws InvalidArgumentError if it is no such address, and OperatingSystemError.
  explicit TcpListener(const std::string& host);
  ~TcpListener();
  TcpListener(TcpListener&&) noexcept;
  TcpListener& operator=(TcpListener&&) noexcept;

  /// Host, port and a random token as printable text without spaces. It is a secret, because whoever knows it may join
  /// the group. It travels unencrypted when ranks connect; therefore nobody else may listen on the network between
  /// them.
  std::string address() const;

 private:
  friend DISTCA_EXPORT std::unique_ptr<Transport> connect_tcp(TcpListener&&, int, std::span<const std::string>, int64_t,
                                                              std::chrono::milliseconds);
  std::unique_ptr<tcp::Listener> listener_;
};

/// Connects the ranks that listen at `addresses` (one for each rank, this rank's own among them) to each other. All of
/// them must call it with the same addresses and number of words. The listener is used up.
///
/// The transport has no heap and refuses puts. Signals of one rank to another arrive in their order. `signal`, `load`
/// and `departed` may be called from several threads, the rest from one. `peek` of a peer that is gone, or silent for 2
/// s, returns the last known value of the word, which is 0 at first. Neither `peek` nor `quiet` waits for a silent peer
/// again before it has answered. `signal` throws PeerTimeoutError if a peer has not read for so long that no more
/// messages are kept for it. A host from which nothing comes for `timeout`, but 1 s at least and 60 s at most, counts
/// as dead, and its ranks with it.
///
/// Throws InvalidArgumentError if ranks disagree or an address is not one; PeerDiedError if a rank has gone;
/// PeerTimeoutError, which names the missing ranks, after `timeout`; OperatingSystemError.
DISTCA_EXPORT std::unique_ptr<Transport> connect_tcp(TcpListener&& listener, int rank,
                                                     std::span<const std::string> addresses, int64_t num_signals,
                                                     std::chrono::milliseconds timeout);

}  // namespace distca::transport
