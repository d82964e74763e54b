// Messages to peers whose memory load and store do not reach. Rows are packed into a send arena as they will lie in the
// peer's heap; a network then sends a few large pieces of it. This is plain data, made on the host, and knows nothing
// of CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/rows.h"
#include "transport/guard.h"

namespace distca::transport {

/// Bytes that go to a peer as they are. The peer's memory is addressed by the same place in this rank's own memory.
struct SendPiece {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

/// All pieces of one message to a peer. They go after its credit and before its signal.
struct SendMessage {
  int32_t peer;
  int32_t first_piece, num_pieces;
  const uint64_t* credit;  // own word; pieces may go once it is >= credit_value. Null: at once
  uint64_t credit_value;
  uint64_t* signal;  // the peer's word, addressed like pieces. Null: none is written
  uint64_t signal_value;
  int64_t round;
};

class DISTCA_EXPORT SendTable {
 public:
  SendTable() = default;
  explicit SendTable(std::span<std::byte> arena) : arena_(arena) {}

  /// Begins the message to a peer. Its `first_piece` and `num_pieces` are ignored.
  void open(const SendMessage& message);
  /// Returns where to pack rows of the message that was opened last, which go to `to` with these strides. Null if the
  /// arena is full. Gaps between heads or rows are sent too, because the extent belongs to the message alone.
  std::byte* add(std::byte* to, int64_t row_stride, int64_t head_stride, const RowExtent& n);
  /// Sets the signal of that message.
  void close(uint64_t* signal, uint64_t value);
  /// Forgets all messages; the arena's room is free again.
  void clear();

  bool empty() const { return messages_.empty(); }
  std::span<const SendMessage> messages() const { return messages_; }
  std::span<const SendPiece> pieces() const { return pieces_; }

 private:
  std::span<std::byte> arena_;
  int64_t used_ = 0;
  std::vector<SendMessage> messages_;
  std::vector<SendPiece> pieces_;
};

/// Carries such messages in the order of a stream. It is a network, or in tests what stands for one.
class Sender {
 public:
  virtual ~Sender() = default;
  /// The places where a stream reads a table when its turn comes. `most_messages` is known when the operation is
  /// queued.
  struct Tables {
    const uint64_t* num_messages;
    const SendMessage* messages;
    const SendPiece* pieces;
    size_t most_messages;
  };
  /// Awaits each message's credit, sends its pieces, then its signal.
  virtual void send(const Tables& tables, const Guard& guard, void* stream) = 0;
  /// Makes what comes later on the stream wait until all pieces so far have arrived.
  virtual void quiet(void* stream) = 0;
};

}  // namespace distca::transport
