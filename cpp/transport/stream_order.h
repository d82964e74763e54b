// What a step needs of a transport that does nothing at once: puts, signals and waits are queued on streams of a device
// and happen there, in order, while the host goes on.
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

/// Slots of a context (ping, pong): so many steps may be under way at once.
inline constexpr int64_t kNumSlots = 2;

/// A word of this rank that has to reach a value.
struct StreamWait {
  int peer = -1;
  int64_t word = 0;
  uint64_t value = 0;
  Awaited what = Awaited::kNothing;
  int64_t round = 0;
};

/// "Work" is what the rank itself queues: its kernels, on a stream of its own.
class DISTCA_EXPORT StreamOrder {
 public:
  virtual ~StreamOrder() = default;

  /// Writes a peer's word once the last use of the slot is over, or, where `after_work`, also all work queued so far.
  /// What waits for a peer and was not sent before comes after it: the peer may be waiting for this very word.
  virtual void grant(int peer, int64_t word, uint64_t value, int64_t slot, bool after_work) = 0;
  /// What is put to that peer until `announce` waits for this.
  virtual void await_credit(const StreamWait& wait) = 0;
  /// Writes the peer's word after the rows that were put to it since.
  virtual void announce(int peer, int64_t word, uint64_t value) = 0;
  /// Starts what was granted, put and announced for the slot: after all work queued so far, but for grants that need
  /// not wait.
  virtual void send(int64_t slot) = 0;
  /// Work queued from here on comes after these messages, which are about the slot.
  virtual void await_rows(std::span<const StreamWait> waits, int64_t slot) = 0;

  /// Fills rows with NaN, where they are when all work queued so far is done, if the streams have stopped by then.
  virtual void poison(const RowView& rows, const RowExtent& n) = 0;
  /// Work queued from here on comes after all that was sent.
  virtual void join() = 0;
  /// The slot's last use, and all that reads tensors of its step, is over with the work queued so far.
  virtual void end(int64_t slot) = 0;

  /// From here on what is queued joins the tape, or fills it: the same operations whatever there is to put, to grant
  /// and to await. Null ends that, and forgets what was not sent.
  virtual void set_tape(std::shared_ptr<Tape> tape) = 0;
  /// Queues what is on a tape.
  virtual void replay(const Tape& tape) = 0;

  /// Why the streams have stopped, if they have.
  virtual std::optional<StreamFault> fault() const = 0;
  /// Stops them: waits end, and nothing is sent any more.
  virtual void stop() noexcept = 0;

  /// Calls `look` now and then from a thread of the transport's until it is destroyed: what the streams wait for, the
  /// host does not see otherwise.
  virtual void watch(std::function<void()> look) = 0;
};

}  // namespace distca::transport
