// The two streams of a rank, on a GPU or on threads that stand for one: that of the rank's own work, and that of its
// transport. What is queued on one happens in order; the streams go on by themselves.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "common/error.h"
#include "common/rows.h"
#include "transport/guard.h"
#include "transport/put_table.h"
#include "transport/send_table.h"
#include "transport/tape.h"

namespace distca::transport {

/// A word of a peer, as this rank addresses it.
struct SignalTo {
  uint64_t* word;
  uint64_t value;
};

class DISTCA_EXPORT Streams {
 public:
  enum class Stream { kWork, kTransfer };
  static constexpr int kNumPoints = 6;

  virtual ~Streams() = default;

  /// Zero-filled memory that ranks of this process can write into, aligned to 256 bytes.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  /// What other processes of this host need to reach memory.
  using Card = std::array<std::byte, 64>;
  struct Shared {
    std::shared_ptr<std::byte> memory;
    Card card;
  };
  /// The same for ranks of other processes of this host.
  virtual Shared allocate_shared(int64_t bytes) = 0;
  /// Memory of as many bytes that another process allocated. Writable as long as that has not let go of it.
  virtual std::shared_ptr<std::byte> open(const Card& card, int64_t bytes) = 0;

  /// A point after what is queued on a stream so far, in place of the one of that number before.
  virtual void record(int point, Stream stream) = 0;
  /// What is queued on the stream from here on comes after that point; a number that was never recorded is no point.
  virtual void wait_for(Stream stream, int point) = 0;
  /// Returns when work may be queued that the host itself will do next: at once, unless the host stands for the device.
  virtual void hand_over() = 0;
  /// Returns when all that was queued is done.
  virtual void drain() noexcept = 0;

  // Each of these does nothing once the streams have stopped.
  /// Awaits each message's credit, copies its rows and writes its signal. On the transport's stream.
  virtual void put(const PutTable& table) = 0;
  /// On the transport's stream.
  virtual void signal(std::span<const SignalTo> signals) = 0;
  /// What has been packed goes out. On the transport's stream, as is the next.
  virtual void send(const SendTable& table, const std::shared_ptr<Sender>& sender) = 0;
  virtual void quiet(const std::shared_ptr<Sender>& sender) = 0;
  /// On the stream of the rank's work.
  virtual void await(std::span<const AwaitedMessage> messages) = 0;
  /// Fills rows with NaN if the streams have stopped, else does nothing. On the stream of the rank's work.
  virtual void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) = 0;

  /// From here on what is queued joins the tape, or fills it, and does not happen; null ends that. Throws
  /// InvalidArgumentError where streams cannot be recorded.
  virtual void set_tape(std::shared_ptr<Tape> tape) = 0;
  /// Queues what is on a tape, and hands over.
  virtual void replay(const Tape& tape) = 0;

  virtual std::optional<StreamFault> fault() const = 0;
  virtual void stop() noexcept = 0;
};

}  // namespace distca::transport
