// The step protocol between the ranks of a context: who may write where and when, agreement on the plan, and faults.
//
// Every rank issues the same sequence of steps. At step n a receiver grants credit to exactly the senders of plan n,
// for the slot n % 2, once its own earlier use of that slot is over; senders wait for that credit, put, and signal. A
// rank waits only for ranks that send to it, or receive from it, in this plan. Each rank publishes its step and plan
// digest; of two neighbours with different digests at least one notices at once, and whoever waits compares again. The
// first fault on a rank is told to all its peers; after that the context is poisoned: nothing of it sends or returns
// rows.
//
// Over a collective transport rows reach a slot only in an exchange, to which its owner comes when the slot is free: so
// there is no credit. All ranks compare their steps in every exchange, before rows move, and who is gone is noticed
// there.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "common/error.h"
#include "plan/tables.h"
#include "runtime/signals.h"
#include "transport/transport.h"

namespace distca::runtime {

/// What makes scores besides q, k and the mask: the same on all ranks of a step.
struct ScoreOptions {
  float scale = 1.f;
  float softcap = 0.f;
  std::span<const float> sinks;  // one for each query head, or none

  /// How ranks compare them.
  uint64_t scale_and_softcap() const;
  uint64_t sinks_digest() const;
};

class Protocol {
 public:
  Protocol(std::unique_ptr<transport::Transport> transport, std::string context_name, int64_t arena_bytes,
           std::chrono::milliseconds timeout);

  transport::Transport& transport() { return *transport_; }
  int64_t rank() const { return transport_->rank(); }
  int64_t num_ranks() const { return transport_->num_ranks(); }
  uint64_t step() const { return step_; }

  /// This rank's arena of the current slot.
  std::byte* arena();

  /// Throws ContextPoisonedError after a fault.
  void check_healthy() const;

  /// Opens the next step: publishes it and compares with the neighbours.
  void begin(plan::Phase phase, uint64_t plan_digest, const ScoreOptions& scores);
  /// Grants every sender of the step credit for round 0; this rank's slot may be written from here on.
  void grant(std::span<const plan::WaitRow> waits);
  /// Grants credit for `round` to the peers that send rows home in it.
  void grant_round(std::span<const plan::WaitRow> waits, int64_t round);
  /// Waits until `peer` lets this rank write into its slot.
  void await_credit(plan::Direction direction, int64_t peer, int64_t round);
  void put(int64_t peer, int64_t target, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& source,
           const RowExtent& extent);
  /// Tells `peer` that all rows of this message are there.
  void announce(plan::Direction direction, int64_t peer, int64_t round);
  /// Rows announced before it on other ranks have arrived after it, where the transport is collective; else it does
  /// nothing. Returns whether any rank (else: this rank) wants `more`.
  bool exchange(bool more);
  void await_rows(plan::Direction direction, int64_t peer, int64_t round);
  /// Closes the step once nothing of it is under way.
  void end();

  /// Poisons the context with its first fault and tells the peers. Later calls do nothing.
  void fail(const Error& error) noexcept;

 private:
  enum class FaultCode : uint64_t { kNone = 0, kMismatch, kDied, kTimeout, kOther };
  struct Wait {
    const char* what = "";
    int64_t peer = -1;
    int64_t word = -1;
    uint64_t value = 0;
    int64_t round = 0;
  };

  uint64_t published_step() const { return step_ << 1 | static_cast<uint64_t>(phase_); }
  int64_t slot() const { return static_cast<int64_t>(step_ % kNumSlots); }
  void wait(const Wait& w);
  void watch();
  void check_departed();
  void check_faults();
  /// Throws PlanMismatchError if `peer` came to this step with another plan, phase or other options of the scores.
  void compare_with(int64_t peer);
  [[noreturn]] void time_out();
  std::string where() const;

  std::unique_ptr<transport::Transport> transport_;
  Signals signals_;
  std::string name_;
  int64_t arena_bytes_;
  std::chrono::milliseconds timeout_;
  uint64_t step_ = 0;
  plan::Phase phase_ = plan::Phase::kForward;
  uint64_t digest_ = 0;
  uint64_t scale_and_softcap_ = 0, sinks_digest_ = 0;
  Wait waiting_;
  std::function<void()> watch_;  // made once: waiting allocates nothing
  std::function<void()> agree_;  // likewise
  std::string poison_;           // why the context is abandoned; empty while healthy
  std::array<uint64_t, Signals::kFaultDetails> fault_details_ = {};
};

}  // namespace distca::runtime
