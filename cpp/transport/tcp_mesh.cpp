#include "transport/tcp_mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>
#include <string>

#include "common/error.h"
#include "common/interrupt.h"

namespace distca::transport::tcp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kCall = 0x3170637461636462;    // "bdcatcp1": the magic of a hello from the rank that connects
constexpr uint64_t kAnswer = 0x3170637461636461;  // "adcatcp1": from the rank that accepted
constexpr int kBacklog = 4096;
constexpr std::chrono::seconds kProbe{1};
/// The number of connections that may be there without having said who they are. A member says so at once.
constexpr size_t kMaxNameless = 256;
/// The number of empty messages that the system sends to a silent host before it counts as dead.
constexpr int kKeepalives = 3;

/// The first message of either side.
struct Hello {
  uint64_t magic = 0;
  Key to_token{};
  Key from_token{};
  int64_t rank = 0;
  int64_t num_ranks = 0;
  int64_t num_signals = 0;
};
static_assert(sizeof(Hello) == 2 * sizeof(Key) + 4 * 8, "no gaps: it is sent as it is");

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw OperatingSystemError(what + ": " + std::strerror(error));
}

Descriptor make_socket(int family) {
  Descriptor socket([&] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket) fail("could not make a TCP socket");
  return socket;
}

void set_option(const Descriptor& socket, int level, int option, int value) {
  if (::setsockopt(socket.get(), level, option, &value, sizeof(value)) != 0) fail("could not set up a TCP socket");
}

void set_options(const Descriptor& socket, std::chrono::milliseconds silence) {
  const auto silence_ms = static_cast<int>(silence.count());
  const int interval = std::max(1, silence_ms / 1000 / (kKeepalives + 1));
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kKeepalives);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, silence_ms);  // used while something is under way
}

int error_of(const Descriptor& socket) {
  int error = 0;
  socklen_t bytes = sizeof(error);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) return errno;
  return error;
}

/// A connection that is on its way to become a peer's.
struct Newcomer {
  Descriptor socket;
  bool is_connected = false;
  std::array<std::byte, sizeof(Hello)> bytes;
  size_t num_bytes = 0;

  /// Takes what has arrived, but no more than a hello. Returns false once the other end has hung up.
  bool receive() {
    while (num_bytes < bytes.size()) {
      const ssize_t n = ::recv(socket.get(), bytes.data() + num_bytes, bytes.size() - num_bytes, 0);
      if (n > 0)
        num_bytes += static_cast<size_t>(n);
      else if (n == 0 || errno != EINTR)
        return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
    return true;
  }
  bool is_complete() const { return num_bytes == bytes.size(); }
  Hello hello() const {
    Hello hello;
    std::memcpy(&hello, bytes.data(), sizeof(hello));
    return hello;
  }
};

/// One call of `connect_mesh`.
class Mesh {
 public:
  Mesh(const Listener& listener, const Group& group, Clock::time_point deadline)
      : listener_(listener),
        group_(group),
        deadline_(deadline),
        next_probe_(Clock::now() + kProbe),
        peers_(group.addresses.size()),
        probes_(group.addresses.size()),
        sockets_(group.addresses.size()),
        has_spoken_(group.addresses.size()) {}

  std::vector<Descriptor> connect() {
    for (int peer = 0; peer < group_.rank; ++peer) at(peers_, peer).socket = start_connecting(peer);
    while (!missing().empty()) step();
    return std::move(sockets_);
  }

 private:
  template <class T>
  static T& at(std::vector<T>& of_ranks, int rank) {
    return of_ranks[static_cast<size_t>(rank)];
  }
  const Address& address(int peer) const { return group_.addresses[static_cast<size_t>(peer)]; }
  std::string name(int peer) const { return message("rank ", peer, " (", address(peer).endpoint.name(), ")"); }
  bool is_missing(int peer) const { return peer != group_.rank && !sockets_[static_cast<size_t>(peer)]; }

  std::string missing() const {
    std::string text;
    for (int i = 0; i < group_.num_ranks(); ++i)
      if (is_missing(i)) text += (text.empty() ? "" : ", ") + name(i);
    return text;
  }

  Descriptor start_connecting(int to) const {
    const Endpoint& there = address(to).endpoint;
    Descriptor socket = make_socket(there.family());
    if (::connect(socket.get(), there.get(), there.bytes) != 0 && errno != EINPROGRESS && errno != EINTR)
      check_reached(to, errno);
    return socket;
  }

  /// Throws unless the connection to that rank was made.
  void check_reached(int to, int error) const {
    require<PeerDiedError>(error != ECONNREFUSED && error != ECONNRESET, "rank ", group_.rank,
                           " found nobody at the address of ", name(to),
                           ": the process has ended, or the address is of an earlier run", refused_);
    if (error != 0) fail(message("rank ", group_.rank, " could not connect to ", name(to)), error);
  }

  Hello hello_to(uint64_t magic, const Key& token) const {
    return {.magic = magic,
            .to_token = token,
            .from_token = listener_.address.token,
            .rank = group_.rank,
            .num_ranks = group_.num_ranks(),
            .num_signals = group_.num_signals};
  }

  /// Sends the first bytes of a connection, which always have room. If the peer hung up, that is noticed when nothing
  /// comes.
  static void send_hello(const Descriptor& socket, const Hello& hello) {
    static_cast<void>(::send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL));
  }

  /// Waits for any news, and takes all of it.
  void step() {
    const Clock::time_point now = Clock::now();
    require<PeerTimeoutError>(now < deadline_, "rank ", group_.rank, " waited too long for the connections of ",
                              missing(), refused_);
    check_interrupt();
    if (now >= next_probe_) probe();
    std::vector<pollfd> fds{{.fd = listener_.socket.get(), .events = POLLIN, .revents = 0}};
    const size_t num_nameless = nameless_.size();
    for (const Newcomer& one : nameless_) fds.push_back({.fd = one.socket.get(), .events = POLLIN, .revents = 0});
    for (const Newcomer& one : peers_)
      fds.push_back(
          {.fd = one.socket.get(), .events = one.is_connected ? short{POLLIN} : short{POLLOUT}, .revents = 0});
    for (const Descriptor& one : probes_) fds.push_back({.fd = one.get(), .events = POLLOUT, .revents = 0});
    for (size_t i = 0; i < sockets_.size(); ++i)
      fds.push_back({.fd = has_spoken_[i] ? -1 : sockets_[i].get(), .events = POLLIN, .revents = 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline_, next_probe_) - now).count();
    const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready < 0 && errno != EINTR) fail("could not wait for the peers");
    if (ready <= 0) return;

    const size_t num_ranks = sockets_.size();
    for (size_t i = 0; i < num_ranks; ++i) {
      const pollfd* const of_rank = &fds[1 + num_nameless + i];
      if (of_rank[0].revents != 0) attend_to(static_cast<int>(i));
      if (of_rank[num_ranks].revents != 0) take_probe(static_cast<int>(i));
      if (of_rank[2 * num_ranks].revents != 0) look_at(static_cast<int>(i));
    }
    for (size_t i = 0; i < num_nameless; ++i)
      if (fds[1 + i].revents != 0) hear(nameless_[i]);
    std::erase_if(nameless_, [](const Newcomer& one) { return !one.socket; });
    if (fds[0].revents != 0) accept_all();
  }

  /// Checks that higher ranks still listen. A rank that ended before it called has no connection that could hang up.
  void probe() {
    next_probe_ = Clock::now() + kProbe;
    for (int i = group_.rank + 1; i < group_.num_ranks(); ++i)
      if (is_missing(i) && !at(probes_, i)) at(probes_, i) = start_connecting(i);
  }

  void take_probe(int peer) {
    const int error = error_of(at(probes_, peer));
    at(probes_, peer).reset();
    if (is_missing(peer)) check_reached(peer, error);
  }

  /// Takes news of the connection to a lower rank.
  void attend_to(int to) {
    Newcomer& peer = at(peers_, to);
    if (!peer.is_connected) {
      check_reached(to, error_of(peer.socket));
      peer.is_connected = true;
      set_options(peer.socket, group_.silence);
      return send_hello(peer.socket, hello_to(kCall, address(to).token));
    }
    const bool is_there = peer.receive();
    require<PeerDiedError>(is_there, name(to), " hung up on rank ", group_.rank,
                           " before they were connected: it has ended, failed, or did not accept this rank's addresses",
                           refused_);
    if (!peer.is_complete()) return;
    const Hello hello = peer.hello();
    require(hello.magic == kAnswer, "what listens at the address of ", name(to), " is no rank of a group");
    check_member(hello, to);
    require(hello.to_token == listener_.address.token, name(to), " answered rank ", group_.rank,
            " with a token that is not this rank's");
    at(sockets_, to) = std::move(peer.socket);
  }

  /// Takes news of a rank that is connected. A hang-up is an error, because a transport that is closed would have said
  /// goodbye. What has come is left for the transport.
  void look_at(int peer) {
    char first;
    const ssize_t n = ::recv(at(sockets_, peer).get(), &first, 1, MSG_PEEK);
    require<PeerDiedError>(n > 0, name(peer), " hung up on rank ", group_.rank,
                           " before all ranks were connected: it has ended, or met an error of its own", refused_);
    has_spoken_[static_cast<size_t>(peer)] = true;
  }

  void accept_all() {
    while (true) {
      Newcomer one;
      Endpoint from;
      from.bytes = sizeof(from.storage);
      one.socket = Descriptor(
          [&] { return ::accept4(listener_.socket.get(), from.get(), &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK); });
      if (!one.socket) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
          fail("could not accept a connection");
        return;  // there is no connection, or it is gone again
      }
      one.is_connected = true;
      nameless_.push_back(std::move(one));
      if (nameless_.size() > kMaxNameless) {
        refused_ = message("; more than ", kMaxNameless, " connections did not say who they are");
        nameless_.pop_front();
      }
    }
  }

  /// Takes what comes over a connection that has not said who it is. A stranger is let go. A member that disagrees is
  /// an error here and also there, because it gets the answer first.
  void hear(Newcomer& one) {
    const bool is_there = one.receive();
    if (one.is_complete()) {
      const Hello hello = one.hello();
      if (hello.magic == kCall && hello.to_token == listener_.address.token) return take_member(one, hello);
    } else if (is_there) {
      return;
    }
    if (one.num_bytes > 0) refused_ = "; a connection that did not show this rank's token was refused";
    one.socket.reset();
  }

  void take_member(Newcomer& one, const Hello& hello) {
    send_hello(one.socket, hello_to(kAnswer, hello.from_token));
    check_member(hello, hello.rank);
    const int from = static_cast<int>(hello.rank);
    require(from > group_.rank && is_missing(from), "rank ", group_.rank, " was called by a second rank ", from);
    set_options(one.socket, group_.silence);
    at(sockets_, from) = std::move(one.socket);
  }

  void check_member(const Hello& hello, int64_t rank) const {
    require(hello.num_ranks == group_.num_ranks(), "rank ", hello.rank, " has ", hello.num_ranks, " ranks, rank ",
            group_.rank, " has ", group_.num_ranks());
    require(hello.rank >= 0 && hello.rank < group_.num_ranks(), "a process called rank ", group_.rank,
            " that calls itself rank ", hello.rank, " of ", hello.num_ranks);
    require(hello.rank == rank, "the process at the address of rank ", rank, " calls itself rank ", hello.rank);
    require(hello.from_token == address(static_cast<int>(rank)).token, "a process that calls itself rank ", rank,
            " is not the one that rank ", group_.rank, " has the address of: ", name(static_cast<int>(rank)));
    require(hello.num_signals == group_.num_signals, "rank ", rank, " has ", hello.num_signals, " signal words, rank ",
            group_.rank, " has ", group_.num_signals, "; they must be equal");
  }

  const Listener& listener_;
  const Group& group_;
  const Clock::time_point deadline_;
  Clock::time_point next_probe_;
  std::vector<Newcomer> peers_;      // to lower ranks, until they have answered
  std::deque<Newcomer> nameless_;    // accepted; they have not said who they are
  std::vector<Descriptor> probes_;   // to higher ranks, on their way
  std::vector<Descriptor> sockets_;  // of the peers that are connected
  std::vector<bool> has_spoken_;     // of each peer: whether something has come since
  std::string refused_;              // the last connection that was let go, for the message
};

}  // namespace

Listener::Listener(const std::string& host) : address{.endpoint = Endpoint::of(host, 0), .token = random_key()} {
  Endpoint& own = address.endpoint;
  socket = make_socket(own.family());
  if (::bind(socket.get(), own.get(), own.bytes) != 0) {
    require(errno != EADDRNOTAVAIL, own.host(), " is not an address of this host");
    fail("could not bind a TCP socket to " + own.host());
  }
  if (::listen(socket.get(), kBacklog) != 0) fail("could not listen at " + own.host());
  if (::getsockname(socket.get(), own.get(), &own.bytes) != 0) fail("could not read the port of a TCP socket");
}

std::vector<Descriptor> connect_mesh(const Listener& listener, const Group& group, Clock::time_point deadline) {
  return Mesh(listener, group, deadline).connect();
}

}  // namespace distca::transport::tcp
