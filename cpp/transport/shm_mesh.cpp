#include "transport/shm_mesh.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <thread>

#include "common/error.h"
#include "common/interrupt.h"
#include "transport/host_memory.h"

namespace distca::transport::shm {
namespace {

constexpr uint64_t kMagic = 0x316d68732d616364;  // "dca-shm1"
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kBacklog = 4096;
constexpr int64_t kProbeMs = 1000;
constexpr int64_t kRetryMs = 1;
constexpr std::chrono::milliseconds kLinger{100};

/// The only message of either side. It is sent along with the region's memfd.
struct Hello {
  uint64_t magic = kMagic;
  int64_t rank = 0;
  int64_t num_ranks = 0;
  int64_t heap_bytes = 0;
  int64_t num_signals = 0;
  Key from_token{};
  Key to_token{};
};

struct Received {
  Hello hello;
  Descriptor memory;
};

/// A member that has called this rank and has no answer yet.
struct Newcomer {
  Descriptor socket;
  Received received;
};

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw OperatingSystemError(what + ": " + std::strerror(error));
}

struct SocketName {
  sockaddr_un address{};
  socklen_t bytes = 0;

  explicit SocketName(const Key& name) {
    const std::string text = "distca-" + to_hex(name);
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());  // a leading zero: no file
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Descriptor make_socket() {
  Descriptor socket([] { return ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket) fail("could not make a Unix socket");
  return socket;
}

uid_t peer_uid(const Descriptor& socket) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0)
    fail("could not read the credentials of a peer");
  return credentials.uid;
}

/// Returns false if too many descriptors are under way: those that the user's processes have sent and none has received
/// may be as many as this process may have open files.
bool send_hello(const Descriptor& socket, const Hello& hello, const Descriptor& memory) {
  iovec data{.iov_base = const_cast<Hello*>(&hello), .iov_len = sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr m{};
  m.msg_iov = &data;
  m.msg_iovlen = 1;
  m.msg_control = control;
  m.msg_controllen = sizeof(control);
  cmsghdr* const c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = memory.get();
  std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
  // If the peer hung up, that is noticed when its answer does not come.
  if (::sendmsg(socket.get(), &m, MSG_NOSIGNAL) >= 0 || errno == EPIPE || errno == ECONNRESET) return true;
  if (errno != ETOOMANYREFS) fail("could not send to a peer");
  return false;
}

/// The message at the front of the socket. Empty if it is no hello, or the other end hung up without one.
std::optional<Received> receive_hello(const Descriptor& socket) {
  Received result;
  bool well_formed = false;
  result.memory = Descriptor([&] {
    iovec data{.iov_base = &result.hello, .iov_len = sizeof(Hello)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr m{};
    m.msg_iov = &data;
    m.msg_iovlen = 1;
    m.msg_control = control;
    m.msg_controllen = sizeof(control);
    const ssize_t n = ::recvmsg(socket.get(), &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    int kept = -1;
    for (cmsghdr* c = n >= 0 ? CMSG_FIRSTHDR(&m) : nullptr; c != nullptr; c = CMSG_NXTHDR(&m, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      // Alignment leaves room for a second descriptor, which may be there.
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= c->cmsg_len; at += sizeof(int)) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(c) + at, sizeof(fd));
        if (kept >= 0) ::close(kept);
        kept = fd;
      }
    }
    well_formed = n == sizeof(Hello) && (m.msg_flags & MSG_TRUNC) == 0 && result.hello.magic == kMagic;
    return kept;
  });
  if (!well_formed) return std::nullopt;
  return result;
}

/// One call of `connect_mesh`.
class Mesh {
 public:
  Mesh(const Listener& listener, const Group& group, const Descriptor& memory,
       std::chrono::steady_clock::time_point deadline)
      : listener_(listener), group_(group), memory_(memory), deadline_(deadline), peers_(group.addresses.size()) {}

  std::vector<Peer> connect() {
    try {
      for (int peer = 0; peer < group_.rank; ++peer) connect_to(peer);
      while (!missing().empty()) step();
    } catch (const PeerDiedError&) {
      // Otherwise ranks that are connected already could see the end of these sockets first, while the kernel is still
      // closing those of the rank that died.
      std::this_thread::sleep_for(kLinger);
      throw;
    }
    return std::move(peers_);
  }

 private:
  std::string name(int peer) const {
    return message("rank ", peer, " (pid ", group_.addresses[static_cast<size_t>(peer)].pid, ")");
  }
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }

  std::string missing() const {
    std::string text;
    for (int i = 0; i < group_.num_ranks(); ++i) {
      if (i != group_.rank && !peers_[static_cast<size_t>(i)].memory) text += (text.empty() ? "" : ", ") + name(i);
    }
    return text;
  }

  void check_deadline() const {
    if (std::chrono::steady_clock::now() < deadline_) return;
    throw PeerTimeoutError(
        message("rank ", group_.rank, " waited too long for the connections of ", missing(), refused_));
  }

  /// Returns 0 once the socket is connected to that rank's, and the error otherwise.
  int connect_error(const Descriptor& socket, int to) const {
    const SocketName there(group_.addresses[static_cast<size_t>(to)].name);
    return ::connect(socket.get(), there.get(), there.bytes) == 0 ? 0 : errno;
  }

  /// Returns false if the peer's queue is full.
  bool try_connect(const Descriptor& socket, int to) const {
    const int error = connect_error(socket, to);
    if (error == ECONNREFUSED)
      throw PeerDiedError(message("rank ", group_.rank, " found nobody at the address of ", name(to),
                                  ": the process has ended, or the address is of an earlier run", others_gone(to),
                                  refused_));
    if (error != 0 && error != EAGAIN && error != EINTR) fail(message("could not connect to ", name(to)), error);
    return error == 0;
  }

  /// Whether the other end is gone. What it has sent before does not count as news.
  static bool has_hung_up(const Descriptor& socket) {
    pollfd fd{.fd = socket.get(), .events = POLLRDHUP, .revents = 0};
    return ::poll(&fd, 1, 0) > 0 && fd.revents != 0;
  }

  /// For a message about one rank that is gone: the others that are gone, too. A rank that finds another gone ends, and
  /// its end may be seen here before that of the rank that ended first. Nobody knows the order, so all are named.
  std::string others_gone(int besides) const {
    std::string text;
    for (int i = 0; i < group_.num_ranks(); ++i) {
      if (i == group_.rank || i == besides) continue;
      const Descriptor& socket = peers_[static_cast<size_t>(i)].socket;
      if (socket ? has_hung_up(socket) : connect_error(make_socket(), i) == ECONNREFUSED)
        text += (text.empty() ? "; gone, too: " : ", ") + name(i);
    }
    return text;
  }

  void connect_to(int to) {
    Descriptor socket = make_socket();
    while (!try_connect(socket, to)) step(kRetryMs);
    const uid_t uid = peer_uid(socket);
    require(uid == ::getuid(), "the process at the address of ", name(to), " runs as user ", uid, ", rank ",
            group_.rank, " as user ", ::getuid());
    // What was sent to this rank is taken meanwhile: otherwise ranks that all wait for room would never make any.
    const Hello hello = hello_to(group_.addresses[static_cast<size_t>(to)].token);
    while (!send_hello(socket, hello, memory_)) step(kRetryMs);
    peer(to).socket = std::move(socket);
  }

  Hello hello_to(const Key& token) const {
    return {.rank = group_.rank,
            .num_ranks = group_.num_ranks(),
            .heap_bytes = group_.heap_bytes,
            .num_signals = group_.num_signals,
            .from_token = listener_.address.token,
            .to_token = token};
  }

  /// Waits for any news, for so many milliseconds at most, and takes all of it.
  void step(int64_t wait = kProbeMs) {
    check_deadline();
    check_interrupt();
    if (!newcomers_.empty()) wait = kRetryMs;
    std::vector<pollfd> fds{{.fd = listener_.socket.get(), .events = POLLIN, .revents = 0}};
    for (const Descriptor& s : nameless_) fds.push_back({.fd = s.get(), .events = POLLIN, .revents = 0});
    for (const Peer& p : peers_) fds.push_back({.fd = p.memory ? -1 : p.socket.get(), .events = POLLIN, .revents = 0});
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now()).count();
    const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, wait)));
    if (ready < 0 && errno != EINTR) fail("could not wait for the peers");
    if (ready == 0 && wait == kProbeMs) probe();
    if (ready > 0) take_news(fds);
    answer_newcomers();
  }

  void take_news(const std::vector<pollfd>& fds) {
    const size_t first_peer = 1 + nameless_.size();
    for (int i = 0; i < group_.num_ranks(); ++i) {
      if (fds[first_peer + static_cast<size_t>(i)].revents != 0) take_answer(i);
    }
    std::vector<Descriptor> waiting;
    for (size_t i = 0; i < nameless_.size(); ++i) {
      if (fds[1 + i].revents != 0) {
        take_newcomer(std::move(nameless_[i]));
      } else {
        waiting.push_back(std::move(nameless_[i]));
      }
    }
    nameless_ = std::move(waiting);
    if (fds[0].revents != 0) accept_one();
  }

  /// Checks that higher ranks still listen. A rank that ended before it called has no connection that could hang up.
  void probe() const {
    for (int i = group_.rank + 1; i < group_.num_ranks(); ++i) {
      if (!peers_[static_cast<size_t>(i)].socket) try_connect(make_socket(), i);
    }
  }

  void accept_one() {
    Descriptor socket(
        [&] { return ::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (!socket) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      fail("could not accept a connection");
    }
    if (const uid_t uid = peer_uid(socket); uid != ::getuid()) {
      refused_ = message("; a connection of user ", uid, " was refused, this is user ", ::getuid());
      return;
    }
    nameless_.push_back(std::move(socket));
  }

  void take_answer(int from) {
    std::optional<Received> received = receive_hello(peer(from).socket);
    if (!received)
      throw PeerDiedError(
          message(name(from), " hung up on rank ", group_.rank,
                  " before they were connected: it has ended, failed, or did not accept this rank's addresses",
                  others_gone(from)));
    check_member(received->hello, from);
    require(received->hello.to_token == listener_.address.token, name(from), " answered rank ", group_.rank,
            " with a token that is not this rank's");
    take_memory(from, std::move(received->memory));
  }

  /// Takes the hello of a connection. A stranger is let go.
  void take_newcomer(Descriptor socket) {
    char first;
    if (::recv(socket.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return;  // a probe: it hung up without a word
    std::optional<Received> received = receive_hello(socket);
    if (!received || received->hello.to_token != listener_.address.token) {
      refused_ = "; a connection that did not show this rank's token was refused";
      return;
    }
    newcomers_.push_back({std::move(socket), std::move(*received)});
  }

  /// Answers the newcomers, as far as that is possible now. A member that disagrees is an error here and also there,
  /// because it gets the answer first.
  void answer_newcomers() {
    size_t answered = 0;
    for (Newcomer& n : newcomers_) {
      const Hello& hello = n.received.hello;
      if (!send_hello(n.socket, hello_to(hello.from_token), memory_)) break;
      ++answered;
      check_member(hello, hello.rank);
      require(hello.rank > group_.rank && !peer(static_cast<int>(hello.rank)).socket, "rank ", group_.rank,
              " was called by a second rank ", hello.rank);
      const int from = static_cast<int>(hello.rank);
      peer(from).socket = std::move(n.socket);
      take_memory(from, std::move(n.received.memory));
    }
    newcomers_.erase(newcomers_.begin(), newcomers_.begin() + static_cast<std::ptrdiff_t>(answered));
  }

  void check_member(const Hello& hello, int64_t rank) const {
    require(hello.num_ranks == group_.num_ranks(), "rank ", hello.rank, " has ", hello.num_ranks, " ranks, rank ",
            group_.rank, " has ", group_.num_ranks());
    require(hello.rank >= 0 && hello.rank < group_.num_ranks(), "a process called rank ", group_.rank,
            " that calls itself rank ", hello.rank, " of ", hello.num_ranks);
    require(hello.rank == rank, "the process at the address of rank ", rank, " calls itself rank ", hello.rank);
    require(hello.from_token == group_.addresses[static_cast<size_t>(rank)].token, "a process that calls itself rank ",
            rank, " is not the one that rank ", group_.rank, " has the address of: ", name(static_cast<int>(rank)));
    require(hello.heap_bytes == group_.heap_bytes, "rank ", rank, " has a heap of ", hello.heap_bytes, " bytes, rank ",
            group_.rank, " one of ", group_.heap_bytes, "; they must be equal");
    require(hello.num_signals == group_.num_signals, "rank ", rank, " has ", hello.num_signals, " signal words, rank ",
            group_.rank, " has ", group_.num_signals, "; they must be equal");
  }

  /// The region must be sealed, because a store into a region that has shrunk would crash this process.
  void take_memory(int from, Descriptor memory) {
    require(static_cast<bool>(memory), name(from), " sent no memory to rank ", group_.rank);
    struct stat info{};
    if (::fstat(memory.get(), &info) != 0) fail("could not examine the memory of " + name(from));
    const int64_t bytes = region_bytes(group_.heap_bytes, group_.num_signals);
    require(info.st_size == bytes, "the memory of ", name(from), " has ", info.st_size, " bytes, rank ", group_.rank,
            " expects ", bytes);
    const int seals = ::fcntl(memory.get(), F_GET_SEALS);
    require(seals >= 0 && (seals & kSeals) == kSeals, "the memory of ", name(from), " is not sealed");
    peer(from).memory = std::move(memory);
  }

  const Listener& listener_;
  const Group& group_;
  const Descriptor& memory_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<Peer> peers_;
  std::vector<Descriptor> nameless_;  // accepted; they have not said who they are
  std::vector<Newcomer> newcomers_;
  std::string refused_;  // the last connection that was let go, for the message
};

}  // namespace

Listener::Listener() : address(Address::random()), socket(make_socket()) {
  const SocketName own(address.name);
  if (::bind(socket.get(), own.get(), own.bytes) != 0) fail("could not name a Unix socket");
  if (::listen(socket.get(), kBacklog) != 0) fail("could not listen on a Unix socket");
}

Descriptor make_memory(int64_t bytes) {
  Descriptor memory([] {
#ifdef MFD_NOEXEC_SEAL
    // Kernels before 6.3 do not know the flag.
    if (const int fd = ::memfd_create("distca", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL); fd >= 0) return fd;
#endif
    return ::memfd_create("distca", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  });
  if (!memory) fail("could not make a memfd");
  if (::ftruncate(memory.get(), bytes) != 0) fail(message("could not give a memfd ", bytes, " bytes"));
  if (::fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) fail("could not seal a memfd");
  return memory;
}

std::vector<Peer> connect_mesh(const Listener& listener, const Group& group, const Descriptor& memory,
                               std::chrono::steady_clock::time_point deadline) {
  return Mesh(listener, group, memory, deadline).connect();
}

}  // namespace distca::transport::shm
