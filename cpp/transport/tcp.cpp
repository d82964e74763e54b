#include "transport/tcp.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "common/worker.h"
#include "transport/host_memory.h"
#include "transport/tcp_connection.h"
#include "transport/tcp_mesh.h"

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;
using tcp::Kind;
using tcp::Message;

/// How long a peer may take to answer before this rank goes on with what it knows.
constexpr std::chrono::seconds kPatience{2};
/// How long a rank that closes waits for the others to read its goodbye.
constexpr std::chrono::seconds kParting{1};
/// A host from which nothing comes counts as dead after the timeout, which is kept within these bounds.
constexpr std::chrono::milliseconds kLeastSilence{1000}, kMostSilence{60000};
/// The number of words that one question may ask for.
constexpr int64_t kMaxAsked = 64;

/// This rank's connection to another one and its state, under the lock of the transport.
struct Peer {
  explicit Peer(Descriptor socket) : connection(std::move(socket)) {}

  tcp::Connection connection;
  // The last question.
  int64_t first = 0, num_asked = 0, num_answered = 0;
  bool has_unconfirmed = false;  // whether signals may be under way
  bool has_read_goodbye = false;

  bool is_open() const { return connection.descriptor() >= 0; }
  bool owes_answer() const { return num_answered < num_asked; }
};

Descriptor make_eventfd() {
  Descriptor made([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  require<OperatingSystemError>(static_cast<bool>(made), "could not make an eventfd: ", std::strerror(errno));
  return made;
}

/// The regions of the peers hold their states and the last known values of their words.
class TcpTransport final : public HostTransport {
 public:
  TcpTransport(int rank, std::vector<Region> regions, Mapping memory, int64_t num_signals,
               std::vector<Descriptor> sockets)
      : HostTransport(rank, std::move(regions)),
        memory_(std::move(memory)),
        num_signals_(num_signals),
        wake_(make_eventfd()),
        peers_(std::make_unique<std::vector<Peer>>(std::make_move_iterator(sockets.begin()),
                                                   std::make_move_iterator(sockets.end()))),
        thread_("distca tcp", [this] { serve(); }) {}

  ~TcpTransport() override {
    if (!in_home_process()) {
      static_cast<void>(peers_.release());  // the parent's thread may have been changing them
      return;
    }
    std::unique_lock lock(thread_.mutex());
    for (Peer& peer : *peers_) static_cast<void>(post(peer, {.kind = Kind::kGoodbye}));
    // Otherwise the system could break a connection on which something arrives unread, and the goodbye would be lost.
    thread_.done().wait_for(lock, kParting, [&] {
      return std::all_of(peers_->begin(), peers_->end(),
                         [](const Peer& peer) { return !peer.is_open() || peer.has_read_goodbye; });
    });
    lock.unlock();
    thread_.stop();
    wake();
  }

  const char* name() const override { return "tcp"; }

  void signal(int to, int64_t word, uint64_t value) override {
    if (to == rank()) return HostTransport::signal(to, word, value);
    check_word(to, word);
    const std::lock_guard lock(thread_.mutex());
    Peer& peer = at(to);
    peer.has_unconfirmed = true;
    require<PeerTimeoutError>(post(peer, {.kind = Kind::kSignal, .word = word, .value = value}), "rank ", rank(),
                              " could not signal rank ", to, ", which has read nothing for long");
  }

  uint64_t peek(int from, int64_t word) const override {
    uint64_t value;
    peek_words(from, word, {&value, 1});
    return value;
  }
  bool peek_asks() const override { return true; }

  bool peek_words(int from, int64_t first, std::span<uint64_t> values) const override {
    const auto count = static_cast<int64_t>(values.size());
    for (int64_t i = 0; i < count; ++i) check_word(from, first + i);
    bool is_answered = true;
    for (int64_t i = 0; i < count && from != rank(); i += kMaxAsked)
      is_answered = ask(from, first + i, std::min(count - i, kMaxAsked)) && is_answered;
    for (int64_t i = 0; i < count; ++i)
      values[static_cast<size_t>(i)] = region(from).word(first + i).load(std::memory_order_seq_cst);
    return is_answered;
  }

  /// Asks each peer a question. Signals arrive in their order; therefore those sent before a question are there once it
  /// is answered.
  void quiet() override {
    for (int to = 0; to < num_ranks(); ++to) {
      {
        check_word(to, 0);
        const std::lock_guard lock(thread_.mutex());
        if (!std::exchange(at(to).has_unconfirmed, false)) continue;
      }
      ask(to, 0, 1);
    }
  }

 private:
  void check_word(int peer, int64_t word) const { static_cast<void>(region(peer).word(word)); }
  Peer& at(int peer) const { return (*peers_)[static_cast<size_t>(peer)]; }
  bool is_present(int peer) const { return region(peer).state() == RankState::kPresent; }

  void wake() const {
    const uint64_t one = 1;
    static_cast<void>(::write(wake_.get(), &one, sizeof(one)));  // fails only if full, which wakes the thread too
  }

  /// Sends a message, or leaves it to the thread. Returns false if too many messages wait for that peer.
  bool post(Peer& peer, const Message& message) const {
    if (!peer.is_open()) return true;
    const bool had_unsent = peer.connection.has_unsent();
    if (!peer.connection.send(message)) return false;
    if (!had_unsent && peer.connection.has_unsent()) wake();
    return true;
  }

  /// Brings what is known of a peer's words up to date. Returns false if the peer is gone or silent. A silent peer is
  /// not asked again before it has answered.
  bool ask(int from, int64_t first, int64_t count) const {
    std::unique_lock lock(thread_.mutex());
    Peer& peer = at(from);
    if (peer.owes_answer() || !is_present(from)) return false;
    if (!post(peer, {.kind = Kind::kQuestion, .count = static_cast<uint32_t>(count), .word = first})) return false;
    peer.first = first;
    peer.num_asked = count;
    peer.num_answered = 0;
    thread_.done().wait_for(lock, kPatience, [&] { return !peer.owes_answer() || !is_present(from); });
    return !peer.owes_answer();
  }

  /// Runs on the thread: takes what arrives, and sends what could not be sent at once.
  void serve() {
    std::vector<pollfd> fds;
    while (true) {
      fds.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
      {
        const std::lock_guard lock(thread_.mutex());
        if (thread_.is_stopping()) return;
        for (const Peer& peer : *peers_) {
          const int events = POLLIN | (peer.connection.has_unsent() ? POLLOUT : 0);
          fds.push_back({.fd = peer.connection.descriptor(), .events = static_cast<short>(events), .revents = 0});
        }
      }
      if (::poll(fds.data(), fds.size(), -1) <= 0) continue;
      if (uint64_t count; fds[0].revents != 0) static_cast<void>(::read(wake_.get(), &count, sizeof(count)));
      for (int p = 0; p < num_ranks(); ++p) serve(p, fds[1 + static_cast<size_t>(p)].revents);
    }
  }

  void serve(int from, int events) {
    tcp::Connection& connection = at(from).connection;
    if ((events & POLLOUT) != 0) {
      const std::lock_guard lock(thread_.mutex());
      connection.flush();
    }
    if ((events & ~POLLOUT) == 0) return;
    if (!connection.receive([&](const Message& message) { return take(from, message); })) part_from(from);
  }

  bool has_words(int64_t first, int64_t count) const {
    return first >= 0 && count >= 1 && count <= kMaxAsked && first <= num_signals_ - count;
  }

  /// Takes a message. Returns false if no rank sends such a message.
  bool take(int from, const Message& message) {
    if (message.kind == Kind::kSignal) {
      if (!has_words(message.word, 1)) return false;
      HostTransport::signal(rank(), message.word, message.value);
      return true;
    }
    const std::lock_guard lock(thread_.mutex());
    Peer& peer = at(from);
    switch (message.kind) {
      case Kind::kQuestion:
        return has_words(message.word, message.count) && answer(peer, message);
      case Kind::kAnswer:
        if (!peer.owes_answer() || message.word != peer.first + peer.num_answered) return false;
        region(from).word(message.word).store(message.value, std::memory_order_release);
        ++peer.num_answered;
        break;
      case Kind::kGoodbye:
        region(from).set_state(RankState::kClosed);
        region(rank()).ring();
        if (!post(peer, {.kind = Kind::kFarewell})) return false;
        break;
      case Kind::kFarewell:
        peer.has_read_goodbye = true;
        break;
      default:
        return false;
    }
    thread_.done().notify_all();
    return true;
  }

  /// Answers with the words as they are now or later, and therefore after what the asking rank published before.
  bool answer(Peer& to, const Message& question) {
    for (int64_t word = question.word; word < question.word + question.count; ++word) {
      const uint64_t value = region(rank()).word(word).load(std::memory_order_seq_cst);
      if (!post(to, {.kind = Kind::kAnswer, .word = word, .value = value})) return false;
    }
    return true;
  }

  /// Called when a connection has ended: it was closed, it broke, or it is closed here because of what came.
  void part_from(int peer) {
    const std::lock_guard lock(thread_.mutex());
    at(peer).connection.close();
    if (is_present(peer)) region(peer).set_state(RankState::kDied);
    region(rank()).ring();
    thread_.done().notify_all();
  }

  Mapping memory_;
  const int64_t num_signals_;
  Descriptor wake_;
  std::unique_ptr<std::vector<Peer>> peers_;  // one for each rank; the own one is not connected
  mutable Worker thread_;                     // last: it ends before what it uses goes
};

/// Parses the addresses, and checks that this rank's own is among them.
std::vector<tcp::Address> check_addresses(const tcp::Listener& listener, int rank,
                                          std::span<const std::string> addresses) {
  const int num_ranks = static_cast<int>(addresses.size());
  require(rank >= 0 && rank < num_ranks, "rank ", rank, " is not one of ", num_ranks, " ranks");
  std::vector<tcp::Address> parsed;
  for (const std::string& text : addresses) parsed.push_back(tcp::Address::parse(text));
  require(parsed[static_cast<size_t>(rank)].token == listener.address.token, "the address of rank ", rank,
          " is not the one of this rank's listener");
  return parsed;
}

}  // namespace

TcpListener::TcpListener(const std::string& host) : listener_(std::make_unique<tcp::Listener>(host)) {}
TcpListener::~TcpListener() = default;
TcpListener::TcpListener(TcpListener&&) noexcept = default;
TcpListener& TcpListener::operator=(TcpListener&&) noexcept = default;

std::string TcpListener::address() const {
  require(listener_ != nullptr, "this listener has been used up");
  return listener_->address.to_string();
}

std::unique_ptr<Transport> connect_tcp(TcpListener&& from, int rank, std::span<const std::string> addresses,
                                       int64_t num_signals, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  const std::unique_ptr<tcp::Listener> listener = std::move(from.listener_);
  require(listener != nullptr, "this listener has been used up");
  require(static_cast<bool>(listener->socket),
          "this listener was made before the process was forked; make it afterwards");
  check_region_sizes(0, num_signals);
  const tcp::Group group{.rank = rank,
                         .addresses = check_addresses(*listener, rank, addresses),
                         .num_signals = num_signals,
                         .silence = std::clamp(timeout, kLeastSilence, kMostSilence)};
  std::vector<Descriptor> sockets = tcp::connect_mesh(*listener, group, deadline);

  const int64_t bytes = region_bytes(0, num_signals);
  Mapping memory = Mapping::anonymous(bytes * group.num_ranks());
  std::vector<Region> regions;
  for (int i = 0; i < group.num_ranks(); ++i) regions.emplace_back(memory.data() + i * bytes, 0, num_signals);
  return std::make_unique<TcpTransport>(rank, std::move(regions), std::move(memory), num_signals, std::move(sockets));
}

}  // namespace distca::transport
