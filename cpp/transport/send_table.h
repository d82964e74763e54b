// Messages to peers whose memory load and store do not reach: rows are packed into a send arena as they will lie in the
// peer's heap, so that a network sends a few large pieces of it. Plain data, made on the host; knows nothing of CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/rows.h"
#include "transport/guard.h"

namespace distca::transport {

/// Bytes that go to a peer as they are. Its memory is addressed by what lies at the same place in this rank's own.
struct SendPiece {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

/// What goes to one peer: after its credit, before one signal.
struct SendMessage {
  int32_t peer;
  int32_t first_piece, num_pieces;
  const uint64_t* credit;  // own word; pieces may go once it is >= credit_value. Null: they may now
  uint64_t credit_value;
  uint64_t* signal;  // the peer's word, addressed like pieces. Null: none is written
  uint64_t signal_value;
  int64_t round;
};

class DISTCA_EXPORT SendTable {
 public:
  SendTable() = default;
  explicit SendTable(std::span<std::byte> arena) : arena_(arena) {}

  /// Begins the message to a peer; its pieces are not looked at.
  void open(const SendMessage& message);
  /// Where rows of the message that was opened last are to be packed, that go to `to` with these strides; null where
  /// the arena is full. Gaps between heads or rows are sent too: the extent is the message's own.
  std::byte* add(std::byte* to, int64_t row_stride, int64_t head_stride, const RowExtent& n);
  /// The signal of that message.
  void close(uint64_t* signal, uint64_t value);
  /// The arena's room is free again.
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

/// Who carries such messages, in the order of a stream: a network, or in tests what stands for it.
class Sender {
 public:
  virtual ~Sender() = default;
  /// Where a stream reads a table when its turn comes; `most_messages` is known before.
  struct Tables {
    const uint64_t* num_messages;
    const SendMessage* messages;
    const SendPiece* pieces;
    size_t most_messages;
  };
  /// For each message: awaits its credit, sends its pieces, then its signal.
  virtual void send(const Tables& tables, const Guard& guard, void* stream) = 0;
  /// What comes later on the stream comes after all pieces so far have been read.
  virtual void quiet(void* stream) = 0;
};

}  // namespace distca::transport
