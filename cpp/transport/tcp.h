// Signals and published words between hosts, over TCP: a control transport, which has no heap.
//
// Every rank keeps its own words. A signal is one message; a peek is a question to the peer, answered by a thread that
// every rank has for its connections. A peer that closes says goodbye first; a hang-up without is the news of its
// death.
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

/// Where the peers of one rank find it. Make one, exchange the addresses by any channel, then call `connect_tcp`.
class DISTCA_EXPORT TcpListener {
 public:
  /// Listens at that address of this host alone, numeric IPv4 or IPv6, with a port of the system's choice. Throws
  /// InvalidArgumentError for what is no such address, OperatingSystemError.
  explicit TcpListener(const std::string& host);
  ~TcpListener();
  TcpListener(TcpListener&&) noexcept;
  TcpListener& operator=(TcpListener&&) noexcept;

  /// Printable, without spaces: host, port, and a random token. Who knows it may join the group, so it is a secret; it
  /// travels unencrypted when ranks connect, so nobody else may listen on the network between them.
  std::string address() const;

 private:
  friend DISTCA_EXPORT std::unique_ptr<Transport> connect_tcp(TcpListener&&, int, std::span<const std::string>, int64_t,
                                                              std::chrono::milliseconds);
  std::unique_ptr<tcp::Listener> listener_;
};

/// Connects the ranks that listen at `addresses` (one a rank, this rank's own among them) to each other. All of them
/// must call it with the same addresses and number of words. The listener is used up.
///
/// The transport has no heap and refuses puts. Signals of one rank to another arrive in their order. `signal`, `load`
/// and `departed` may be called from several threads, the rest from one. `peek` of a peer that is gone, or silent for
/// 2 s, gives what is last known of the word, at first 0; it does not wait for a silent peer again before that has
/// answered, and nor does `quiet`. `signal` throws PeerTimeoutError where a peer has not read for so long that no more
/// messages are kept for it. A host from which nothing comes for `timeout`, 1 s at least and 60 s at most, counts as
/// dead, and its ranks with it.
///
/// Throws InvalidArgumentError where ranks disagree, or an address is not one; PeerDiedError where a rank has gone;
/// PeerTimeoutError, with the ranks that are missing, after `timeout`; OperatingSystemError.
DISTCA_EXPORT std::unique_ptr<Transport> connect_tcp(TcpListener&& listener, int rank,
                                                     std::span<const std::string> addresses, int64_t num_signals,
                                                     std::chrono::milliseconds timeout);

}  // namespace distca::transport
