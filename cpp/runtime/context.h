// A context: one rank's membership in an attention group. Holds the heap, the step counter and the kernel's scratch.
//
// The process has one registry of contexts by name; operators find theirs there.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
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
  int64_t slot_bytes = 0;    // arena bytes of one slot
  uint64_t cost_digest = 0;  // of the cost model that plans must have been made with
  std::chrono::milliseconds timeout{600'000};
};

/// Heap bytes and signal words that a transport for such a context must have.
struct HeapNeeds {
  int64_t heap_bytes;
  int64_t num_signals;
  int64_t send_arena_bytes;  // for rows to ranks that load and store do not reach
};
DISTCA_EXPORT HeapNeeds heap_needs(int64_t num_ranks, int64_t slot_bytes);

class DISTCA_EXPORT Context {
 public:
  /// Without a backend: the CPU's.
  Context(std::unique_ptr<transport::Transport> transport, ContextOptions options,
          std::shared_ptr<Backend> backend = nullptr);
  ~Context();

  const ContextOptions& options() const { return options_; }
  Backend& backend() const { return *backend_; }
  const char* transport_name() { return protocol_.transport().name(); }
  transport::Transport& transport() { return protocol_.transport(); }
  int64_t rank() const { return protocol_.rank(); }
  int64_t num_ranks() const { return protocol_.num_ranks(); }
  uint64_t step() const { return protocol_.step(); }

  /// Whether a plan tensor may be used here, before anything moves: intact, for this rank, heads, rows and capacity.
  /// `num_rows` and `heads` are those of the tensors. Throws the error that says which of these is wrong.
  plan::SliceView accept(std::span<const int64_t> plan_words, const HeadShape& heads, int64_t num_rows) const;
  /// Throws InvalidArgumentError unless `backward` is a plan for the gradients of what `forward` computes: of the same
  /// layout and mask. Both were accepted.
  void check_same_problem(const plan::SliceView& forward, const plan::SliceView& backward) const;

  /// One collective step. `slice` was accepted. A fault poisons the context. `owner` keeps tensors and sinks alive for
  /// a recording.
  void forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
               const Parallel& parallel, std::shared_ptr<void> owner);
  void backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                const Parallel& parallel, std::shared_ptr<void> owner);

  /// A step in parts, each a collective call, so that a second one may be under way at the same time. `dispatch` sends
  /// this home's rows and returns the number of the step, `attend` computes and sends results home, `collect` takes in
  /// those of this home: the returned tensors are complete. `owner` keeps plan and tensors, which must not change,
  /// alive until `collect` gives it back. Parts out of order, or a step where no slot is free, are refused before
  /// anything moves.
  uint64_t dispatch(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                    std::shared_ptr<void> owner);
  uint64_t dispatch(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                    const Parallel& parallel, std::shared_ptr<void> owner);
  void attend(uint64_t step, const Parallel& parallel);
  std::shared_ptr<void> collect(uint64_t step, plan::Phase phase);

  /// Says that a step was dispatched and will not be finished, where that is so: a fault, of which the peers are told
  /// at once. May be called from any thread, also while another is in a step. `why` ends the message.
  void abandon(uint64_t step, const std::string& why) noexcept;
  /// Says that a call of this context was refused before it began: a call as well, of which the peers learn if they do
  /// not refuse it too. As `abandon`, from any thread.
  void refuse(const std::string& why) noexcept;
  /// Changes with every call that begins or is refused.
  uint64_t num_calls() const { return protocol_.num_calls() + num_refused_; }

  /// Steps from here on are recorded and not done; those of a context whose steps are queued. `headroom`: the room in
  /// the tables of each operation, over what this plan needs. `rounds`: those of a step, where its plan has fewer.
  std::shared_ptr<Recording> begin_recording(double headroom, int64_t rounds);
  /// Ends that. InvalidArgumentError, and no recording, where a step is not complete, or there is none.
  void end_recording();
  /// Ends that with nothing kept, if it is so.
  void drop_recording() noexcept;
  bool is_recording() const { return open_recording_ != nullptr; }
  /// Makes the steps of a recording the next ones, with a plan for each, or one for all. A collective call, which
  /// `replay` has to follow. A plan that does not fit is refused before anything changes; with `check_only`
  /// that is all.
  void replan(const std::shared_ptr<Recording>& recording, std::span<const std::span<const int64_t>> plans,
              bool check_only);
  /// Does these steps.
  void replay(const std::shared_ptr<Recording>& recording);

  /// Throws the fault that this rank has met, also of a step that was queued on a device and that no call has reported
  /// yet, or of which a peer has told. Waits for nothing.
  void check();

  /// Spans and copies of this rank's steps since the call before, where the trace is on. Not during a call.
  void set_trace(bool on) { protocol_.trace().set_on(on); }
  std::vector<Span> take_trace() { return protocol_.trace().take(); }
  std::vector<Copy> take_copies() { return protocol_.trace().take_copies(); }

  /// For tests, before the first step.
  void set_hooks(Dispatcher::Hooks hooks) { dispatcher_.set_hooks(std::move(hooks)); }

 private:
  /// One call at a time.
  struct Flag {
    bool try_lock() { return !held.exchange(true, std::memory_order_acquire); }
    void unlock() { held.store(false, std::memory_order_release); }
    std::atomic<bool> held{false};
  };
  class Call;
  /// Runs what moves rows; a fault poisons the context.
  template <class Body>
  auto guarded(const Body& body);
  void settle_abandoned() noexcept;
  void check_once(std::span<const int64_t> plan_words) const;
  /// Throws InvalidArgumentError unless the next step may begin, with that slice.
  void check_may_begin() const;
  void check_may_begin(const plan::SliceView& slice) const;
  void fill_again(Recording& recording, std::span<const plan::SliceView> slices, bool check_only);

  ContextOptions options_;
  std::shared_ptr<Backend> backend_;
  Protocol protocol_;
  Dispatcher dispatcher_;
  std::shared_ptr<Recording> open_recording_;
  std::shared_ptr<Recording> planned_;  // its steps are the next ones
  Flag in_step_;
  // Checksums of the last plans that were validated.
  mutable std::mutex valid_mutex_;
  mutable std::array<int64_t, 32> valid_ = {};
  mutable size_t next_valid_ = 0;
  std::mutex abandoned_mutex_;
  std::vector<std::pair<uint64_t, std::string>> abandoned_;  // steps, not yet looked after; 0: a refused call
  std::atomic<uint64_t> num_refused_{0};
  std::atomic<bool> has_abandoned_{false};
};

/// Registers a context under its name; a name in use is an error.
DISTCA_EXPORT void add_context(std::shared_ptr<Context> context);
/// The context of that name, or an InvalidArgumentError that lists the names there are.
DISTCA_EXPORT std::shared_ptr<Context> find_context(std::string_view name);
/// Context::refuse of the context of that name, if there is one.
DISTCA_EXPORT void refuse(std::string_view name, const std::string& why) noexcept;
/// Takes the context out of the registry; false if there was none.
DISTCA_EXPORT bool remove_context(const std::string& name);

}  // namespace distca::runtime
