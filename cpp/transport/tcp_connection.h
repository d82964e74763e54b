// Messages between two ranks over a TCP connection. They have one size and keep their order, and no call waits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "common/fork_guard.h"

namespace distca::transport::tcp {

enum class Kind : uint32_t {
  kSignal = 1,  // word = value, at the receiver
  kQuestion,    // asks for `count` words of the receiver from `word` on
  kAnswer,      // one for each of these words, ascending
  kGoodbye,     // the sender closes its transport
  kFarewell,    // the goodbye has been read
};

struct Message {
  Kind kind{};
  uint32_t count = 0;
  int64_t word = 0;
  uint64_t value = 0;
};
static_assert(sizeof(Message) == 24, "no gaps: it is sent as it is");

/// One end of a connection. One thread receives and closes. The caller holds a lock while it sends, and while it
/// closes.
class Connection {
 public:
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {}

  /// -1 once it is closed.
  int descriptor() const { return socket_.get(); }
  void close();

  /// Sends at once what the system takes, and keeps the rest. Returns false and sends nothing if too much is kept,
  /// because the peer has not read for long. What is sent to a peer that has hung up is lost.
  bool send(const Message& message);
  bool has_unsent() const { return num_sent_ < unsent_.size(); }
  /// Sends what was kept, as far as the system takes it.
  void flush();

  /// Hands messages that have arrived to `take`. Returns false once the other end has hung up, or if `take` refuses
  /// one.
  bool receive(const std::function<bool(const Message&)>& take);

 private:
  /// Returns how many of these bytes the system took, or lost.
  size_t offer(const std::byte* data, size_t bytes);

  Descriptor socket_;
  std::vector<std::byte> unsent_;
  size_t num_sent_ = 0;  // bytes of `unsent_`
  std::array<std::byte, 128 * sizeof(Message)> arrived_;
  size_t num_arrived_ = 0;  // bytes of a message that is not complete
};

}  // namespace distca::transport::tcp
