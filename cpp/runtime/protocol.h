// The step protocol between the ranks of a context: who may write where and when, agreement on the plan, and faults.
//
// Every rank makes the same sequence of calls: each does a whole step, or one of its parts (dispatch, attend, collect),
// so that two steps may be under way at once. A step gets the slot that is free; where both are, the one that the step
// before did not get. At step n a receiver grants credit to exactly the senders of plan n, for the step's slot, once
// its own earlier use of that slot is over; senders wait for that credit, put, and signal. Peers that sent it rows in
// that earlier use are told at its end already (credits.h), unless steps are queued. A rank waits only for ranks that
// send to it, or receive from it, in this plan. Each rank publishes its calls with their plan digests; of two
// neighbours whose calls differ at least one notices at once, and whoever waits compares again. The first fault on a
// rank is told to all its peers; after that the context is poisoned: nothing of it sends or returns rows.
//
// No rank waits for ever, by induction over the calls. Whatever dispatch waits for (credit), peers give when they come
// to the same call, before they wait themselves, or gave at the end of an earlier one. Whatever attend waits for (rows
// of the step, credit to send results home) was given in the step's dispatch, and the first round that collect waits
// for in its attend: earlier calls, which all ranks complete. Dispatcher::collect_rows has the argument for the rounds
// within collect.
//
// Over a collective transport rows reach a slot only in an exchange, to which its owner comes when the slot is free: so
// there is no credit. All ranks compare their steps in every exchange, before rows move, and who is gone is noticed
// there.
//
// Steps that were recorded are done by a replay: all of them get their numbers, and are made known, in one call.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/digest.h"
#include "common/error.h"
#include "plan/origin.h"
#include "plan/tables.h"
#include "runtime/credits.h"
#include "runtime/signals.h"
#include "runtime/trace.h"
#include "transport/stream_order.h"
#include "transport/transport.h"

namespace distca::runtime {

/// What makes scores besides q, k and the mask: the same on all ranks of a step. And how a rank computes, which is its
/// own affair.
struct ScoreOptions {
  float scale = 1.f;
  float softcap = 0.f;
  std::span<const float> sinks;  // one for each query head, or none
  bool deterministic = false;    // as attention::Problem; not compared

  /// How ranks compare them.
  uint64_t scale_and_softcap() const;
  uint64_t sinks_digest() const;
};

/// What a call does of a step; or that it does steps that were recorded, or was refused and did nothing. All ranks
/// split their steps alike.
enum class Part : uint64_t { kWhole = 0, kDispatch, kAttend, kCollect, kReplay, kRefused };

/// A step as all ranks know it.
struct StepId {
  uint64_t number = 0;  // from 1
  int64_t slot = 0;
  plan::Phase phase = plan::Phase::kForward;
  uint64_t plan_digest = 0, scale_and_softcap = 0, sinks_digest = 0;

  /// "step 7 (forward)"
  std::string name() const;
};

class Protocol {
 public:
  Protocol(std::unique_ptr<transport::Transport> transport, std::string context_name, int64_t arena_bytes,
           std::chrono::milliseconds timeout);
  ~Protocol();

  transport::Transport& transport() { return *transport_; }
  int64_t rank() const { return transport_->rank(); }
  int64_t num_ranks() const { return transport_->num_ranks(); }
  /// Steps begun so far.
  uint64_t step() const { return at_.num_steps; }

  /// This rank's arena of the slot of the step at hand, or of any.
  std::byte* arena() { return transport_->heap().data() + slot() * arena_bytes_; }
  int64_t arena_bytes() const { return arena_bytes_; }

  /// Throws ContextPoisonedError after a fault.
  void check_healthy() const;
  /// Throws the fault that this rank, its streams or a peer have met meanwhile, if there is one.
  void check();
  /// Whether steps are queued on the streams of a device: then nothing below returns late or with news of a fault.
  bool is_queued() const { return stream_ != nullptr; }
  /// Returns when nothing is queued any more.
  void drain() noexcept;

  /// Whether another step may begin.
  bool has_free_slot() const { return free_slot() >= 0; }
  /// Begins the next step with a call that does `part` of it: publishes it and compares with the neighbours. What
  /// follows is about this step.
  StepId begin(plan::Phase phase, const plan::Header& plan, const ScoreOptions& scores, Part part);
  /// A further call, about a step that is under way.
  void resume(const StepId& step, Part part);
  /// Grants every sender of the step credit for round 0; this rank's slot may be written from here on, or, of a step
  /// that is queued, once the slot's last use is over.
  void grant(std::span<const plan::WaitRow> waits);
  /// Grants credit for `round` to the peers that send rows home in it.
  void grant_round(std::span<const plan::WaitRow> waits, int64_t round);
  /// Waits until `peer` lets this rank write into its slot.
  void await_credit(plan::Direction direction, int64_t peer, int64_t round);
  void put(int64_t peer, int64_t target, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& source,
           const RowExtent& extent);
  /// Tells `peer` that all rows of this message are there.
  void announce(plan::Direction direction, int64_t peer, int64_t round);
  /// Delivers what was put, granted and announced since the last flush. It returns whether there is to be another
  /// flush in this step.
  /// - Direct transports: it does nothing, because puts and signals are on their way already. It returns `more`.
  /// - Collective transports: all ranks exchange their rows here. Rows that other ranks announced before their flush
  ///   have then arrived. It returns whether any rank wants `more`.
  /// - Queued steps: the tables of this slot are sent to the streams. It returns `more`.
  bool flush(bool more);
  /// Waits for the rows of all messages of that direction and round.
  void await_rows(std::span<const plan::WaitRow> waits, plan::Direction direction, int64_t round);
  /// Of a step that is queued: rows to be returned become NaN if there was a fault.
  void poison(const RowView& rows, const RowExtent& n);
  /// Returns, or of a step that is queued lets the work go on, once nothing of the step is under way.
  void settle();
  /// Closes the step, of which nothing is under way any more, and frees its slot.
  void end();
  /// Whether peers may write into this slot before this rank comes to the step at hand.
  bool is_freed_early() const { return !stream_ && !transport_->is_collective(); }

  /// Steps of a queued context, from here on, join a tape, or fill it again: nobody is told of them. They begin with
  /// slot 0; none may be under way. Those that only join it have numbers that no step ever has which is done.
  void set_tape(std::shared_ptr<transport::Tape> tape, bool is_complete);
  /// Ends that, as if there had been no such steps.
  void take_back();
  /// Ends that: these steps are the next ones. Tells the peers, in one call for all, and compares.
  void announce_replay();
  /// Queues them.
  void replay(const transport::Tape& tape);

  Trace& trace() { return trace_; }
  /// A span of the trace, if that is on: its own lifetime.
  class Timer {
   public:
    Timer(Protocol& protocol, const char* name, bool is_wait = false, int64_t peer = -1)
        : protocol_(protocol), name_(name), is_wait_(is_wait), peer_(peer) {
      if (protocol.trace_.is_on()) begin_ns_ = Trace::now();
    }
    ~Timer() {
      if (protocol_.trace_.is_on()) protocol_.record(*this);
    }
    Timer(const Timer&) = delete;

   private:
    friend class Protocol;
    Protocol& protocol_;
    const char* name_;
    bool is_wait_;
    int64_t peer_;
    int64_t begin_ns_ = 0;
  };

  /// Poisons the context with its first fault and tells the peers. Later calls do nothing.
  void fail(const std::exception& error) noexcept;
  /// The fault of a step that was begun here and will not be finished.
  void abandon(const StepId& step, const std::string& why) noexcept;
  /// A call that did not come to `begin` or `resume`. It counts as one all the same: nothing has happened if all ranks
  /// refuse it, and if only some do it is a fault of all.
  void refuse(const std::string& why) noexcept;
  /// Changes with every call.
  uint64_t num_calls() const { return num_calls_; }

 private:
  enum class FaultCode : uint64_t { kNone = 0, kMismatch, kDied, kLeft, kTimeout, kUnfinished, kRefused, kOther };
  /// A fault as ranks tell each other of it. Who is told by one rank tells the others the same.
  struct Fault {
    FaultCode code = FaultCode::kNone;
    std::array<uint64_t, Signals::kFaultDetails - 1> details = {};
    std::string text = {};
    int64_t found_by = -1;  // a rank; -1: this one
  };
  struct Wait {
    const char* what = "";
    int64_t peer = -1;
    int64_t word = -1;
    uint64_t value = 0;
    int64_t round = 0;
  };
  Wait credit_wait(plan::Direction direction, int64_t peer, int64_t round) const;
  Wait rows_wait(plan::Direction direction, int64_t peer, int64_t round) const;

  /// What is published of the call at hand: its number, and what it does.
  uint64_t call_word() const;
  int64_t slot() const { return at_.now.slot; }
  int64_t free_slot() const;
  void enter(const StepId& step, Part part);
  void publish();
  /// Makes known how the plan was made, for the words of a peer that has another one. Once, but with every step over a
  /// collective transport, whose peers see what was published before the last exchange and nothing older.
  void describe_plan(const plan::Header& plan);
  void give_credit(int64_t peer, int64_t round, bool after_work);
  void wait(const Wait& w);
  void record(const Timer& timer);
  void watch();
  /// Whether that peer has left, or, of -1, any. Throws the fault instead where one was told: a rank tells of its fault
  /// before it leaves, so that is looked for afterwards.
  std::optional<transport::Departure> departed(int64_t peer);
  void check_departed();
  void check_faults();
  void check_streams();
  /// Throws PeerDiedError or PeerLeftError if the peer is gone, of which this step needs something to come.
  void check_present(int64_t peer, const char* what);
  /// What the thread that watches the streams does: no more than stop them and tell the peers.
  void look() noexcept;
  void tell_peers(const Fault& fault) noexcept;
  void send_text(int64_t peer, const std::string& text);
  std::string text_of(int64_t peer) const;
  /// What that plan of a peer differs in from the one at hand, in brackets after a blank; empty where it is not known.
  std::string difference_to(int64_t peer, uint64_t plan_digest) const;
  /// Throws PlanMismatchError if this call of `peer` is another one, or about another plan or other scores.
  void compare_with(int64_t peer);
  void compare_with_early_senders(int64_t slot);
  [[noreturn]] void time_out();
  std::string where() const;
  /// "rank 1 is at step 7", or that it does not answer.
  std::string step_of(int64_t peer) const;

  std::unique_ptr<transport::Transport> transport_;
  transport::StreamOrder* stream_;  // null: steps are not queued
  Signals signals_;
  std::string name_;
  int64_t arena_bytes_;
  std::chrono::milliseconds timeout_;
  /// Where the sequence of steps is.
  struct Position {
    uint64_t num_steps = 0;
    StepId now;  // the step at hand
    int64_t last_slot = 0;
    Credits credits;
  };
  Position at_;
  std::atomic<uint64_t> num_calls_{0};
  Part part_ = Part::kWhole;
  /// Plans that were made known, by their digests; the next one takes the place of the oldest.
  std::array<std::pair<uint64_t, plan::Origin>, Signals::kDescribedPlans> described_ = {};
  int64_t num_described_ = 0;
  std::array<bool, kNumSlots> busy_ = {};
  std::array<uint64_t, kNumSlots> marks_ = {};  // of the transport, after the last put of the slot's step
  Trace trace_;
  // Of steps on a tape.
  bool is_silent_ = false;
  Position before_;
  Digest calls_;
  uint64_t num_recorded_ = 0;
  Wait waiting_;
  std::vector<transport::StreamWait> stream_waits_;
  std::atomic<bool> told_peers_{false};
  std::function<void()> watch_;  // made once: waiting allocates nothing
  std::function<void()> agree_;  // likewise
  std::string poison_;           // why the context is abandoned; empty while healthy
  Fault fault_;                  // set before its error is thrown; without a code: the error says all
};

}  // namespace distca::runtime
