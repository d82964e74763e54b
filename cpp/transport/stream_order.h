// The operations that a step needs of a transport that does nothing at once. Puts, signals and waits are queued on
// streams of a device and happen there, in order, while the host goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "common/error.h"
#include "common/rows.h"
#include "transport/guard.h"
#include "transport/tape.h"

namespace distca::transport {

/// The number of slots of a context (ping, pong), and of steps that may be under way at once.
inline constexpr int64_t kNumSlots = 2;

/// A word of this rank that has to reach a value, and what it stands for.
struct StreamWait {
  int peer = -1;
  int64_t word = 0;
  uint64_t value = 0;
  Awaited what = Awaited::kNothing;
  int64_t round = 0;
};

/// Below, "work" is what the rank itself queues on a stream of its own: its kernels.
class DISTCA_EXPORT StreamOrder {
 public:
  virtual ~StreamOrder() = default;

  /// Begins a step: makes work queued from here on come after the last use of every slot, on whatever stream that was
  /// queued.
  virtual void begin() = 0;
  /// Makes work queued from here on come after all that was sent of the slot, whose memory it will change.
  virtual void reuse(int64_t slot) = 0;
  /// Writes a peer's word once the last use of the slot is over; with `after_work`, also after all work queued so far.
  /// A grant comes before everything not sent yet that waits for a peer, because the peer may be waiting for this very
  /// word.
  virtual void grant(int peer, int64_t word, uint64_t value, int64_t slot, bool after_work) = 0;
  /// Makes all puts to that peer, from here until `announce`, wait for this word.
  virtual void await_credit(const StreamWait& wait) = 0;
  /// Writes the peer's word after the rows that were put to it since `await_credit`, and after all that was sent
  /// before.
  virtual void announce(int peer, int64_t word, uint64_t value) = 0;
  /// Starts what was granted, put and announced for the slot. All of it comes after the work queued so far, except
  /// grants that need not wait for that.
  virtual void send(int64_t slot) = 0;
  /// Says that all has been sent of the slot that lies in the tensors of its step, and not in its arena. `await_reads`
  /// makes work queued from there on wait for that.
  virtual void end_reads(int64_t slot) = 0;
  virtual void await_reads(int64_t slot) = 0;
  /// Makes work queued from here on wait for these messages, which are about the slot.
  virtual void await_rows(std::span<const StreamWait> waits, int64_t slot) = 0;

  /// Fills rows with NaN once all work queued so far is done, if the streams have stopped by then.
  virtual void poison(const RowView& rows, const RowExtent& n) = 0;
  /// Says that the slot's last use is over once the work queued so far is done and what was sent of it has left.
  virtual void end(int64_t slot) = 0;
  /// Makes work queued from here on wait for all that was sent. A replay needs that, because it knows no point from
  /// before it.
  virtual void join() = 0;

  /// Whether a graph is captured of what is queued.
  virtual bool is_captured() const = 0;
  /// Makes what is queued from here on join the tape, or fill it again. The operations are then the same whatever there
  /// is to put, to grant and to await. Null ends this. Every call forgets what was not sent.
  virtual void set_tape(std::shared_ptr<Tape> tape) = 0;
  /// Queues all operations of a tape.
  virtual void replay(const Tape& tape) = 0;

  /// The wait for which the streams have stopped, if one lasted too long.
  virtual std::optional<StreamFault> fault() const = 0;
  /// Stops the streams: waits end, and nothing is sent any more.
  virtual void stop() noexcept = 0;

  /// Calls `look` every few milliseconds from a thread of the transport, until the transport is destroyed or `watch` is
  /// called again. Null ends it. The host has no other way to see what the streams wait for.
  virtual void watch(std::function<void()> look) = 0;
};

}  // namespace distca::transport
