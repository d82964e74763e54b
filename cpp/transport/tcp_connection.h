// Messages between two ranks over a TCP connection: of one size, in their order, and nobody waits.
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
  kQuestion,    // for `count` words of the receiver from `word` on
  kAnswer,      // one for each of them, ascending
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

/// One thread receives and closes; sending is under a lock of the caller's, and so is closing.
class Connection {
 public:
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {}

  /// -1 once it is closed.
  int descriptor() const { return socket_.get(); }
  void close();

  /// Sends at once what the system takes, and keeps the rest. False, and nothing is sent, where too much is kept: the
  /// peer has not read for long. What is sent to a peer that has hung up is lost.
  bool send(const Message& message);
  bool has_unsent() const { return num_sent_ < unsent_.size(); }
  /// Sends what was kept, as far as the system takes it.
  void flush();

  /// Hands messages that have arrived to `take`. False once the other end has hung up, or `take` refuses one.
  bool receive(const std::function<bool(const Message&)>& take);

 private:
  /// How many of these bytes the system takes, or loses.
  size_t offer(const std::byte* data, size_t bytes);

  Descriptor socket_;
  std::vector<std::byte> unsent_;
  size_t num_sent_ = 0;  // of these bytes
  std::array<std::byte, 128 * sizeof(Message)> arrived_;
  size_t num_arrived_ = 0;  // bytes of a message that is not complete
};

}  // namespace distca::transport::tcp
