// The two streams of a rank, on a GPU or on threads that stand for one: one for the rank's own work, one for its
// transport. What is queued on a stream happens in order, and the host does not wait for it.
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
  static constexpr int kNumPoints = 8;

  virtual ~Streams() = default;

  /// Zero-filled memory that ranks of this process can write into, aligned to 256 bytes.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  /// The bytes that another process of this host needs to reach memory.
  using IpcHandle = std::array<std::byte, 64>;
  struct Shared {
    std::shared_ptr<std::byte> memory;
    IpcHandle handle;
  };
  /// Zero-filled memory that ranks of other processes of this host can write into, with its handle.
  virtual Shared allocate_shared(int64_t bytes) = 0;
  /// Opens memory of that many bytes that another process allocated. It is writable as long as that process keeps it.
  virtual std::shared_ptr<std::byte> open(const IpcHandle& handle, int64_t bytes) = 0;

  /// Sets that point after what is queued on the stream so far. This replaces the earlier point of the same number.
  virtual void record(int point, Stream stream) = 0;
  /// Makes what is queued on the stream from here on come after that point. A number that was never recorded has no
  /// effect.
  virtual void wait_for(Stream stream, int point) = 0;
  /// Called at the end of a step, of a replay and after a fault. On a device it returns at once. Where threads of the
  /// host stand for the device, it returns when the rank's work is done, because what the host itself does next follows
  /// no stream.
  virtual void join_host() = 0;
  /// Returns when everything that was queued is done.
  virtual void drain() noexcept = 0;

  // Each of these does nothing once the streams have stopped.
  /// Awaits each message's credit, copies its rows and writes its signal, on the transport's stream.
  virtual void put(const PutTable& table) = 0;
  /// Writes the words, on the transport's stream.
  virtual void signal(std::span<const SignalTo> signals) = 0;
  /// Sends what has been packed, on the transport's stream. `quiet` queues there a wait until it has left the send
  /// arena.
  virtual void send(const SendTable& table, const std::shared_ptr<Sender>& sender) = 0;
  virtual void quiet(const std::shared_ptr<Sender>& sender) = 0;
  /// Awaits the messages, on the stream of the rank's work.
  virtual void await(std::span<const AwaitedMessage> messages) = 0;
  /// Fills rows with NaN if the streams have stopped, and otherwise does nothing, on the stream of the rank's work.
  virtual void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) = 0;

  /// Whether a graph is captured of what is queued on the stream of the rank's work.
  virtual bool is_captured() const = 0;
  /// Makes what is queued from here on join the tape, or fill it, and not happen. Null ends that. Throws
  /// InvalidArgumentError if the streams cannot be recorded.
  virtual void set_tape(std::shared_ptr<Tape> tape) = 0;
  /// Queues all operations of a tape, and hands over.
  virtual void replay(const Tape& tape) = 0;

  virtual std::optional<StreamFault> fault() const = 0;
  virtual void stop() noexcept = 0;
};

}  // namespace distca::transport
