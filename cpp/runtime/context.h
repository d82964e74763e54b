// A context is one rank's membership in an attention group. It holds the transport with its heap, the protocol, and the
// dispatcher with its scratch.
//
// The process has one registry of contexts by name. Operators find their context there.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"
#include "runtime/dispatcher.h"
#include "runtime/protocol.h"
#include "runtime/recording.h"
#include "transport/transport.h"

namespace distca::runtime {

struct ContextOptions {
  std::string name = "default";
  int64_t slot_bytes = 0;    // bytes of one slot for what plans arrange
  uint64_t cost_digest = 0;  // of the cost model with which plans must have been made
  std::chrono::milliseconds timeout{600'000};
};

/// The sizes that a transport for such a context must have.
struct HeapNeeds {
  int64_t heap_bytes;
  int64_t num_signals;
  int64_t send_arena_bytes;  // for rows to ranks that load and store do not reach
};
DISTCA_EXPORT HeapNeeds heap_needs(int64_t num_ranks, int64_t slot_bytes);

class DISTCA_EXPORT Context {
 public:
  /// A null backend means the CPU's.
  Context(std::unique_ptr<transport::Transport> transport, ContextOptions options,
          std::shared_ptr<Backend> backend = nullptr);
  ~Context();

  const ContextOptions& options() const { return options_; }
  Backend& backend() const { return *backend_; }
  const char* transport_name() { return protocol_.transport().name(); }
  transport::Transport& transport() { return protocol_.transport(); }
  /// All bytes of one slot.
  int64_t arena_bytes() const { return protocol_.arena_bytes(); }
  int64_t rank() const { return protocol_.rank(); }
  int64_t num_ranks() const { return protocol_.num_ranks(); }
  uint64_t step() const { return protocol_.step(); }

  /// Checks, before anything moves, that a plan tensor may be used here: that it is intact and fits this rank, heads,
  /// rows and capacity. `num_rows` and `heads` are those of the tensors. Throws the error that says which of these is
  /// wrong.
  plan::SliceView accept(std::span<const int64_t> plan_words, const HeadShape& heads, int64_t num_rows) const;
  /// Throws InvalidArgumentError if the plan has other scales or softcaps for this rank's rows. The result is without
  /// what the plan says, because ranks may differ in it.
  ScoreOptions accept(const plan::SliceView& slice, ScoreOptions scores) const;
  /// Throws InvalidArgumentError unless `backward` is a plan for the gradients of what `forward` computes, with the
  /// same layout and mask. Between plans with labels only this rank's rows are compared, and every rank checks its own.
  /// Both must have been accepted.
  void check_same_problem(const plan::SliceView& forward, const plan::SliceView& backward) const;

  /// Does one collective step. `slice` must have been accepted, and `scores` with it. A fault poisons the context.
  /// `owner` keeps tensors and sinks alive for a recording.
  void forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
               const Parallel& parallel, std::shared_ptr<void> owner);
  void backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                const Parallel& parallel, std::shared_ptr<void> owner);

  /// These do a step in parts. Each part is a collective call; therefore a second step may be under way at the same
  /// time. `dispatch` sends this home's rows and returns the number of the step. `attend` computes and sends results
  /// home. `collect` takes in the results of this home; afterwards the returned tensors are complete. `owner` keeps
  /// plan and tensors alive until `collect` returns it; they must not change until then. Parts out of order, and a step
  /// when no slot is free, are refused before anything moves.
  uint64_t dispatch(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                    std::shared_ptr<void> owner);
  uint64_t dispatch(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                    const Parallel& parallel, std::shared_ptr<void> owner);
  void attend(uint64_t step, const Parallel& parallel);
  std::shared_ptr<void> collect(uint64_t step, plan::Phase phase, const Parallel& parallel);

  /// Says what ranks compare of the steps that begin from here on: the name of their layer (empty: unknown), and of
  /// backward steps the number of the forward step whose gradients they compute (0: unknown).
  void set_caller(std::string_view layer, uint64_t forward_step) {
    protocol_.set_caller(layer_word(layer), forward_step);
  }
  /// Says that a step will not be finished. If it was dispatched and not collected, and is not being recorded, that is
  /// a fault, and the peers are told at once. May be called from any thread, also while another thread is in a step.
  /// `why` ends the message.
  void abandon(uint64_t step, const std::string& why) noexcept;
  /// Says that a call of this context was refused before it began. That is a call too: the peers learn of it unless
  /// they refuse it as well. May be called from any thread, as `abandon` may.
  void refuse(const std::string& why) noexcept;
  /// What this context is in its job, and faults outside of it (protocol.h).
  void set_job(std::vector<int64_t> global_ranks, Protocol::OnFault on_fault) {
    protocol_.set_job(std::move(global_ranks), std::move(on_fault));
  }
  void hear(const std::string& kind, const std::string& text) noexcept { protocol_.hear(kind, text); }
  /// A number that changes with every call that begins or is refused.
  uint64_t num_calls() const { return protocol_.num_calls() + num_refused_; }
  /// How many forward steps have begun whose largest scores nobody asked for.
  uint64_t num_without_max_logits() const { return num_without_max_logits_; }

  /// From here on, steps are recorded and not done. The context's steps must be queued ones. The tables of each
  /// operation get room for `headroom` times what this plan needs. A step goes through at least `rounds` rounds, also
  /// where its plan has fewer.
  std::shared_ptr<Recording> begin_recording(double headroom, int64_t rounds);
  /// Ends the recording. Throws InvalidArgumentError, and keeps no recording, if a step is not complete or none was
  /// recorded.
  void end_recording();
  /// Ends the recording, if there is one, and keeps nothing.
  void drop_recording() noexcept;
  bool is_recording() const { return open_recording_ != nullptr; }
  /// Whether the open recording is captured into a graph. What PyTorch queues between its steps is then done again too.
  bool is_captured() const { return open_recording_ && open_recording_->tape()->is_captured(); }
  /// Makes the steps of a recording the next ones, with a plan for each or one plan for all. This is a collective call,
  /// and `replay` must follow it. A plan that does not fit is refused before anything changes. With `check_only`
  /// nothing else is done.
  void replan(const std::shared_ptr<Recording>& recording, std::span<const std::span<const int64_t>> plans,
              bool check_only);
  /// Does the steps of the recording that was replanned.
  void replay(const std::shared_ptr<Recording>& recording);

  /// Throws the fault that this rank has met or that a peer has told of. This includes faults of queued steps that no
  /// call has reported yet. Waits for nothing.
  void check();

  /// Turns the trace on or off, and takes the spans and copies of this rank's steps since they were last taken. Not to
  /// be called during a call.
  void set_trace(bool on) { protocol_.trace().set_on(on); }
  std::vector<Span> take_trace() { return protocol_.trace().take(); }
  std::vector<Copy> take_copies() { return protocol_.trace().take_copies(); }

  /// Tests may set hooks before the first step.
  void set_hooks(Dispatcher::Hooks hooks) { dispatcher_.set_hooks(std::move(hooks)); }

 private:
  /// A lock without waiting, which keeps calls to one at a time.
  struct Flag {
    bool try_lock() { return !held.exchange(true, std::memory_order_acquire); }
    void unlock() { held.store(false, std::memory_order_release); }
    std::atomic<bool> held{false};
  };
  class Call;
  /// Runs `body`, which moves rows. An exception poisons the context.
  template <class Body>
  auto guarded(const Body& body);
  template <class Tensors, class Make>
  uint64_t begin_step(const plan::SliceView& slice, const Tensors& tensors, const ScoreOptions& scores,
                      const Parallel& parallel, std::shared_ptr<void> owner, const Make& make);
  template <class Make>
  std::shared_ptr<void> go_on(Part part, uint64_t step, std::optional<plan::Phase> phase, const Parallel& parallel,
                              const Make& make);
  void settle_abandoned() noexcept;
  void check_once(std::span<const int64_t> plan_words) const;
  /// These throw InvalidArgumentError unless the next step may begin, with that slice.
  void check_may_begin() const;
  void check_may_begin(const plan::SliceView& slice) const;
  /// Throws InvalidArgumentError if a device captures a graph of what is queued here, unless it captures the recording.
  void check_captured_as_recorded();
  void fill_again(Recording& recording, std::span<const plan::SliceView> slices, bool check_only);

  ContextOptions options_;
  std::shared_ptr<Backend> backend_;
  Protocol protocol_;
  Dispatcher dispatcher_;
  std::shared_ptr<Recording> open_recording_;
  std::shared_ptr<Recording> planned_;  // its steps are the next ones
  Flag in_step_;
  // Checksums of the plans that were validated last.
  mutable std::mutex valid_mutex_;
  mutable std::array<int64_t, 32> valid_ = {};
  mutable size_t next_valid_ = 0;
  std::mutex abandoned_mutex_;
  std::vector<std::pair<uint64_t, std::string>> abandoned_;  // steps not yet dealt with; 0: a refused call
  std::atomic<uint64_t> num_refused_{0};
  std::atomic<uint64_t> num_without_max_logits_{0};
  std::atomic<bool> has_abandoned_{false};
};

/// Registers a context under its name; a name in use is an error.
DISTCA_EXPORT void add_context(std::shared_ptr<Context> context);
/// The context of that name, or an InvalidArgumentError that lists the names there are.
DISTCA_EXPORT std::shared_ptr<Context> find_context(std::string_view name);
/// Calls Context::refuse of the context of that name, if there is one.
DISTCA_EXPORT void refuse(std::string_view name, const std::string& why) noexcept;
/// Takes the context out of the registry. Returns false if there was none.
DISTCA_EXPORT bool remove_context(const std::string& name);

}  // namespace distca::runtime
