// The transport: one-sided puts and signals on a symmetric heap, waits, and news of peers that are gone.
//
// Every rank owns a heap of the same size and the same number of 64-bit signal words. A peer writes into them with
// `put` and `signal`, and nobody else takes part. A collective transport is the exception: it delivers in `exchange`
// alone. The runtime decides what the words mean.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "common/error.h"
#include "common/rows.h"

namespace distca::transport {

/// A peer that will never answer again.
struct Departure {
  int peer = -1;
  bool orderly = false;  // it closed its transport; otherwise its process (or, on loopback, its thread) died
};

class StreamOrder;

class DISTCA_EXPORT Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const = 0;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  /// Throws InvalidArgumentError if `peer` is no rank of the group, and in a forked child.
  virtual void check_peer(int peer) const { static_cast<void>(peek(peer, 0)); }

  /// This rank's heap, zero-filled at first and aligned to 4096 bytes.
  virtual std::span<std::byte> heap() = 0;

  /// Starts a copy of rows into `peer`'s heap at `heap_offset`, laid out there with the given strides. The source must
  /// stay unchanged until `quiet` returns. Puts to one peer may become visible in any order.
  virtual void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
                   const RowExtent& extent) = 0;

  /// Whether `put` copies the rows itself. Its duration is then the time in which the rows travel.
  virtual bool copies_in_put() const { return false; }

  /// Writes `value` into `peer`'s signal word once every earlier put of this rank to that peer is visible there.
  /// Signals may overtake each other, also signals to the same word.
  virtual void signal(int peer, int64_t word, uint64_t value) = 0;

  /// The value of this rank's own signal word. What was put before the signal is visible after this load (acquire).
  virtual uint64_t load(int64_t word) const = 0;

  /// Writes this rank's own word, which peers read by `peek`. A `publish` followed by a `peek` is sequentially
  /// consistent: of two ranks that both do so, at least one sees the other's value.
  virtual void publish(int64_t word, uint64_t value) = 0;

  /// The current value of a signal word of `peer`.
  virtual uint64_t peek(int peer, int64_t word) const = 0;
  /// Whether a peek asks the peer and waits for its answer. Otherwise it reads memory.
  virtual bool peek_asks() const { return false; }
  /// Reads consecutive words as if they were peeked one after another. This is cheaper where a peek is a question.
  /// Returns false if the peer does not answer; the values are then those last known, perhaps of different times.
  virtual bool peek_words(int peer, int64_t first, std::span<uint64_t> values) const {
    for (uint64_t& value : values) value = peek(peer, first++);
    return true;
  }

  /// Returns when every put and signal of this rank has been delivered.
  virtual void quiet() = 0;
  /// Drops puts and signals that wait to be made, and returns when none is being made. The memory that they read may be
  /// freed then.
  virtual void cancel() noexcept {}

  /// `mark` marks what this rank has put and signalled so far, and `quiet_until` waits only for what is before a mark.
  /// A step thus waits for the puts that it must, while others are under way.
  virtual uint64_t mark() const { return 0; }
  virtual void quiet_until(uint64_t /*mark*/) { quiet(); }
  /// Like `signal`, but the value is also written after everything before the mark, to whatever peer that went. May
  /// wait for that.
  virtual void signal_after(uint64_t mark, int peer, int64_t word, uint64_t value) {
    quiet_until(mark);
    signal(peer, word, value);
  }

  /// Whether puts, signals and published words reach the peers in `exchange` and at no other time.
  virtual bool is_collective() const { return false; }

  /// Not null if puts and waits for rows happen later than the calls, in the order of a device's streams.
  virtual StreamOrder* stream_order() { return nullptr; }

  /// Called by all ranks equally often. A collective transport delivers what all ranks put, signalled and published
  /// since the previous call. It calls `agree` once, when what the peers published can be seen and before anything else
  /// moves; `agree` may throw. Returns whether any rank wants `more`. A transport that is not collective knows of this
  /// rank alone.
  virtual bool exchange(bool more, const std::function<void()>& /*agree*/) { return more; }

  /// Tells the peers of a fault on this rank if the transport is collective, because a signal would not reach them any
  /// more. Nothing else is called afterwards.
  virtual void abandon(const Error& /*why*/) noexcept {}

  /// A peer whose departure this rank has learnt of. Died peers come first, then the lowest rank. Cheap enough to poll.
  virtual std::optional<Departure> departed() const = 0;
  /// The departure of that one peer, if it is known to be gone.
  virtual std::optional<Departure> departed(int peer) const = 0;

  /// Waits until this rank's `word` >= `value`. While it waits it calls `idle` at least every few milliseconds; `idle`
  /// may throw. Returns false if the deadline has passed. Throws Interrupted if a handler of a signal raises.
  bool wait(int64_t word, uint64_t value, std::chrono::steady_clock::time_point deadline,
            const std::function<void()>& idle);

 protected:
  /// Delivers something of what this rank has held back, if it holds anything back. Called while waiting.
  virtual void progress() {}
  /// A counter that changes whenever somebody writes into this rank's signal words.
  virtual uint32_t doorbell() const = 0;
  /// Sleeps until the doorbell differs from `seen`, a peer departs, or the time is over; may return early.
  virtual void doze(uint32_t seen, std::chrono::microseconds at_most) const = 0;
  friend class WrappingTransport;
};

}  // namespace distca::transport
