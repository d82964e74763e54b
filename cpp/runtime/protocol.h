// The step protocol between the ranks of a context: who may write where and when, agreement on the plan, and faults.
//
// Every rank makes the same sequence of calls. A call does a whole step, or one of its parts (dispatch, attend,
// collect); therefore two steps may be under way at once. A step gets the slot that is free. Where both are free, it
// gets the one that the step before did not get.
//
// At step n a receiver grants credit for the step's slot to exactly the senders of plan n, once its own earlier use of
// that slot is over. A sender waits for the credit, puts, and signals. Peers that sent rows here in that earlier use
// need no credit unless steps are queued: they are told at the end of that use (credits.h). A rank waits only for ranks
// that send to it, or receive from it, in this plan.
//
// A step may end while its results still leave the arena. The next step in the slot begins when they have left, and
// peers are told that the slot is free when they have left.
//
// Each rank publishes its calls with their plan digests. Of two neighbours whose calls differ, at least one notices at
// once, and a rank that waits for a peer compares with it again. Queued steps wait on the device, and compare with all
// ranks beforehand where that costs no question. A rank tells its first fault to all its peers. From then on the
// context is poisoned: it sends and returns no more rows.
//
// No rank waits for ever, by induction over the calls. Dispatch waits for credit only. Peers give it when they come to
// the same call, before they wait themselves, or gave it at the end of an earlier call. Attend waits for rows of its
// step and for credit to send results home in round 0. Both were given in the step's dispatch. Collect first waits for
// results of round 0, which were sent in the step's attend. Dispatch and attend are earlier calls about the same step,
// which all ranks complete. Dispatcher::collect_rows has the argument for the later rounds.
//
// Over a collective transport rows reach a slot only in an exchange. A rank comes to an exchange when its slot is free;
// therefore there is no credit. All ranks compare their steps in every exchange, before rows move. There they also
// notice who is gone.
//
// Recorded steps are done by a replay. One call before it gives all of them their numbers and tells the peers.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/digest.h"
#include "common/error.h"
#include "plan/origin.h"
#include "plan/tables.h"
#include "runtime/credits.h"
#include "runtime/layer.h"
#include "runtime/max_logits.h"
#include "runtime/signals.h"
#include "runtime/trace.h"
#include "transport/stream_order.h"
#include "transport/transport.h"

namespace distca::runtime {

/// The values on which scores depend besides q, k and the mask. `scale`, `softcap` and `finds_max_logits` are the same
/// on all ranks of a step; the others are a rank's own.
struct ScoreOptions {
  float scale = 1.f;
  float softcap = 0.f;
  const float* sinks = nullptr;   // of this rank's rows: on the device, one for each query head; null for none
  bool deterministic = false;     // as in attention::Problem
  bool finds_max_logits = false;  // whether the largest scores are asked for

  /// The word by which ranks compare what must be the same.
  uint64_t options_word() const;
};

/// The work of a call: a whole step, one part of it, the recorded steps of a replay, or nothing because it was refused.
/// All ranks split their steps alike.
enum class Part : uint64_t { kWhole = 0, kDispatch, kAttend, kCollect, kReplay, kRefused };

/// The rounds [begin, end).
struct Rounds {
  int64_t begin, end;
};

/// A step as all ranks know it.
struct StepId {
  uint64_t number = 0;  // from 1
  int64_t slot = 0;
  plan::Phase phase = plan::Phase::kForward;
  uint64_t plan_digest = 0, options_word = 0, layer = kUnknownLayer;
  /// The number of the forward step whose gradients this backward step computes; 0 where that is not known, and where
  /// ranks may be in different ones.
  uint64_t forward_step = 0;

  /// "step 7 (forward)"
  std::string name() const;
};

class Protocol {
 public:
  /// Plans arrange `slot_bytes` of each slot.
  Protocol(std::unique_ptr<transport::Transport> transport, std::string context_name, int64_t slot_bytes,
           std::chrono::milliseconds timeout);
  ~Protocol();

  transport::Transport& transport() { return *transport_; }
  int64_t rank() const { return transport_->rank(); }
  int64_t num_ranks() const { return transport_->num_ranks(); }
  /// Tells what this context is in its job: the global rank of each rank, which messages name (empty: they are the
  /// ranks), and what is called with the kind and text of each fault that this rank met here. To be called before the
  /// first step.
  using OnFault = std::function<void(const std::string& kind, const std::string& text)>;
  DISTCA_EXPORT void set_job(std::vector<int64_t> global_ranks, OnFault on_fault);
  /// The number of steps begun so far.
  uint64_t step() const { return at_.num_steps; }

  /// This rank's arena in the slot of the step at hand.
  std::byte* arena() { return transport_->heap().data() + slot() * arena_bytes_; }
  int64_t arena_bytes() const { return arena_bytes_; }

  /// Throws ContextPoisonedError after a fault.
  void check_healthy() const;
  /// Throws if a peer has told of a fault or died, or the streams of this rank have met a fault.
  void check();
  /// Whether steps are queued on the streams of a device. Then no function below waits for credit or rows, and a wait
  /// that fails on a stream is reported by a later call.
  bool is_queued() const { return stream_ != nullptr; }
  /// Whether a device captures a graph of what is queued.
  bool is_captured() const { return stream_ != nullptr && stream_->is_captured(); }
  /// To be called before the work of a step: that comes after the work of the steps before, whatever streams they used.
  void begin_work() {
    if (stream_) stream_->begin();
  }
  /// Returns when nothing is queued any more.
  void drain() noexcept;

  /// Whether another step may begin.
  bool has_free_slot() const { return free_slot() >= 0; }
  /// Says of the steps that begin from here on to which layer they belong (layer.h), and of backward steps whose
  /// gradients they compute (StepId::forward_step). May be called from any thread.
  void set_caller(uint64_t layer, uint64_t forward_step) {
    layer_ = layer;
    forward_step_ = forward_step;
  }
  /// Begins the next step with a call that does `part` of it. Publishes the call and compares it with the neighbours.
  /// Then it waits until the results of the slot's last step have left. The functions below are about this step from
  /// then on.
  StepId begin(plan::Phase phase, const plan::Header& plan, const ScoreOptions& scores, Part part);
  /// Makes a further call, about a step that is under way.
  void resume(const StepId& step, Part part);
  /// Grants credit for round 0 to every sender of the step. From here on peers may write into this rank's slot; where
  /// steps are queued, once the slot's last use is over.
  void grant(std::span<const plan::WaitRow> waits);
  /// Grants credit for `round` to the peers that send rows home in it.
  void grant_round(std::span<const plan::WaitRow> waits, int64_t round);
  /// Waits until `peer` lets this rank write into its slot. To be called before each message.
  void await_credit(plan::Direction direction, int64_t peer, int64_t round);
  void put(int64_t peer, int64_t target, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& source,
           const RowExtent& extent);
  /// Says that nothing will be put any more that lies in the tensors of the step, but only what lies in the arena.
  void end_dispatch();
  /// Tells `peer` that all rows of this message are there.
  void announce(plan::Direction direction, int64_t peer, int64_t round);
  /// Whether rows move only in a flush, to which all ranks come.
  bool is_collective() const { return transport_->is_collective(); }
  /// Delivers what was put, granted and announced since the last flush. It returns whether there is to be another
  /// flush in this step.
  /// - Direct transports: it does nothing, because puts and signals are on their way already. It returns `more`.
  /// - Collective transports: all ranks exchange their rows here. Rows that other ranks announced before their flush
  ///   have then arrived. It returns whether any rank wants `more`.
  /// - Queued steps: the tables of this slot are sent to the streams. It returns `more`.
  bool flush(bool more);
  /// Waits for the rows of all messages of that direction and those rounds.
  void await_rows(std::span<const plan::WaitRow> waits, plan::Direction direction, Rounds rounds);
  /// Fills with NaN the rows that a queued step returns, if there was a fault.
  void poison(const RowView& rows, const RowExtent& n);
  /// Returns once no put reads the tensors of the step. Where steps are queued it returns at once, and work queued
  /// later waits for that instead.
  void settle();
  /// Closes the step and frees its slot.
  void end();
  /// Whether peers may write into this slot before this rank comes to the step at hand.
  bool is_freed_early() const { return !stream_ && !transport_->is_collective(); }

  /// From here on, steps join the tape, or fill it again where it `is_complete`. They must be queued ones, and none may
  /// be under way. The first of them gets slot 0. Peers are told of none. Steps that join a tape get numbers that no
  /// step that is done ever has.
  void set_tape(std::shared_ptr<transport::Tape> tape, bool is_complete);
  /// Ends set_tape, as if its steps had never been.
  void take_back();
  /// Ends set_tape, and makes its steps the next ones. Tells the peers in one call for all of them, and compares.
  void announce_replay();
  /// Queues the steps on the tape.
  void replay(const transport::Tape& tape);

  Trace& trace() { return trace_; }
  /// A span of the trace from the construction to the destruction of this object, if the trace is on.
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

  /// Poisons the context with its first fault and tells the peers. Does nothing after that.
  void fail(const std::exception& error) noexcept;
  /// Poisons the context because a step that was begun here will not be finished.
  void abandon(const StepId& step, const std::string& why) noexcept;
  /// Counts a call that was refused before `begin` or `resume`. If all ranks refuse it, nothing has happened. If only
  /// some do, it is a fault of all ranks.
  void refuse(const std::string& why) noexcept;
  /// Takes in a fault of a process outside of this context. It ends the context as a fault of a peer does, and the
  /// peers are told at once. May be called from any thread.
  DISTCA_EXPORT void hear(const std::string& kind, const std::string& text) noexcept;
  /// A number that changes with every call.
  uint64_t num_calls() const { return num_calls_; }

 private:
  enum class FaultCode : uint64_t {
    kNone = 0,
    kMismatch,
    kDied,
    kLeft,
    kTimeout,
    kUnfinished,
    kRefused,
    kLayer,
    kForwardStep,
    kElsewhere,  // outside of this context: the details have its kind, the text says all
    kOther
  };
  /// A fault as ranks tell each other of it. A rank that was told of a fault tells the others the same.
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
  /// The signal by which `from` says that its rows of a message have arrived.
  struct Arrival {
    int64_t word;
    uint64_t value;
  };
  Arrival arrival_of(plan::Direction direction, int64_t from, int64_t round) const;
  Wait credit_wait(plan::Direction direction, int64_t peer, int64_t round) const;
  Wait rows_wait(plan::Direction direction, int64_t peer, int64_t round) const;

  /// The word that is published of the call at hand: its number, and what it does.
  uint64_t call_word() const;
  int64_t slot() const { return at_.now.slot; }
  int64_t free_slot() const;
  void enter(const StepId& step, Part part);
  void publish();
  /// Publishes how the plan was made, so that a peer with another plan can say what differs. Does so once for a plan.
  /// Over a collective transport it does so with every step, because peers see what was published before the last
  /// exchange and nothing older.
  void describe_plan(const plan::Header& plan);
  void give_credit(int64_t peer, int64_t round, bool after_work);
  void wait(const Wait& w);
  void record(const Timer& timer);
  void watch();
  /// The departure of that peer, or of any peer where `peer` is -1. Throws a fault instead if one was told: a rank
  /// tells of its fault before it leaves, and therefore faults are looked for after the departure was seen.
  std::optional<transport::Departure> departed(int64_t peer);
  void check_departed();
  void check_faults();
  [[noreturn]] void throw_elsewhere(const Fault& fault) const;
  void check_streams();
  /// Throws PeerDiedError or PeerLeftError if the peer is gone. `what` is what it still owes this step.
  void check_present(int64_t peer, const char* what);
  /// Runs on the thread that watches the streams. It does no more than stop them and tell the peers.
  void look() noexcept;
  void tell_peers(const Fault& fault) noexcept;
  void send_text(int64_t peer, const std::string& text);
  std::string text_of(int64_t peer) const;
  /// Says how that plan of a peer differs from the one at hand, in brackets after a blank. Empty where that is not
  /// known.
  std::string difference_to(int64_t peer, uint64_t plan_digest) const;
  /// Throws PlanMismatchError if this call of `peer` is another one, or about another plan, other scores, another layer
  /// or another forward step, and PeerLeftError if the peer refused it.
  void compare_with(int64_t peer);
  /// Throws PeerLeftError if a peer that is gone refused one of this rank's earlier calls. This rank may have made that
  /// one without a wait for the peer, before a neighbour of the peer came to it.
  void compare_earlier_calls(int64_t peer);
  void compare_layer(int64_t peer, uint64_t layer);
  void compare_forward_step(int64_t peer, uint64_t forward_step);
  void compare_with_early_senders(int64_t slot);
  [[noreturn]] void time_out();
  std::string where() const;
  /// "rank 1", and "rank 1 (global rank 3)" where global ranks are others.
  std::string name_of(int64_t rank) const;
  std::string global_name(int64_t rank) const;
  /// "rank 1 is at step 7", or that the rank does not answer.
  std::string step_of(int64_t peer) const;

  std::unique_ptr<transport::Transport> transport_;
  transport::StreamOrder* stream_;  // null: steps are not queued
  Signals signals_;
  std::string name_;
  int64_t arena_bytes_;
  std::chrono::milliseconds timeout_;
  /// The position in the sequence of steps.
  struct Position {
    uint64_t num_steps = 0;
    StepId now;  // the step at hand
    int64_t last_slot = 0;
    Credits credits;
  };
  Position at_;
  std::atomic<uint64_t> num_calls_{0};
  std::atomic<uint64_t> layer_{kUnknownLayer}, forward_step_{0};
  Part part_ = Part::kWhole;
  /// The plans that were made known, with their digests. The next one takes the place of the oldest.
  std::array<std::pair<uint64_t, plan::Origin>, Signals::kDescribedPlans> described_ = {};
  int64_t num_described_ = 0;
  std::array<bool, kNumSlots> busy_ = {};
  // The transport's marks after the puts of the slot's step: those of its dispatch, and all.
  std::array<uint64_t, kNumSlots> dispatched_ = {}, put_ = {};
  Trace trace_;
  // These are about steps on a tape.
  bool is_silent_ = false;
  Position before_;
  Digest calls_;
  uint64_t num_recorded_ = 0;
  Wait waiting_;
  std::vector<transport::StreamWait> stream_waits_;
  std::atomic<bool> told_peers_{false};
  std::function<void()> watch_;  // made once: waiting allocates nothing
  std::function<void()> agree_;  // made once, too
  std::string poison_;           // why the context is abandoned; empty while healthy
  Fault fault_;                  // set before its error is thrown; kNone: the error says all
  std::vector<int64_t> global_ranks_;
  OnFault on_fault_;
  std::mutex heard_mutex_;
  Fault heard_;
  std::atomic<bool> has_heard_{false};
};

}  // namespace distca::runtime
