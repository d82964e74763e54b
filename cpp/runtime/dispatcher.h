// The dispatcher runs one rank's slice of a plan over the transport. A forward step and a backward step are each done
// in three parts: dispatch, attend, collect. The parts are one call, or three, between which another step may go on in
// the other slot.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "common/parallel.h"
#include "plan/tables.h"
#include "runtime/backend.h"
#include "runtime/protocol.h"
#include "runtime/recording.h"

namespace distca::runtime {

/// The tensors of this rank, [T, heads, dim] with T = the layout's rows of this rank. Inputs are never written.
struct ForwardTensors {
  RowView q, k, v;
  RowView out, lse;               // returned; lse [T, q_heads] fp32
  std::byte* retained = nullptr;  // returned too, as many bytes as the plan retains; null where no backward will come
};
struct BackwardTensors {
  RowView q, k, v, out, lse, dout;
  std::byte* retained = nullptr;  // returned by the forward step; null where the plan retains nothing here
  RowView dq, dk, dv;             // returned
};

class Dispatcher {
 public:
  Dispatcher(Protocol& protocol, Backend& backend);
  ~Dispatcher();

  /// Does a whole step.
  void forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
               const Parallel& parallel);
  void backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                const Parallel& parallel);

  /// Throws InvalidArgumentError unless another step may begin. The error says what is under way.
  void check_slot() const;
  /// Sends this home's rows to their servers, and returns the number of the step. `owner` keeps slice, tensors and
  /// sinks alive. Inputs must not change until the step is collected.
  uint64_t dispatch(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                    std::shared_ptr<void> owner);
  uint64_t dispatch(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                    const Parallel& parallel, std::shared_ptr<void> owner);

  /// A step that was dispatched and not yet collected.
  struct Step;
  /// The step of that number, if `attend` (after dispatch) or `collect` (after attend) may come now. Otherwise throws
  /// InvalidArgumentError.
  Step& step_for(Part part, uint64_t number);
  /// Computes this server's tasks of the step, and sends home the first round of results.
  void attend(Step& step, const Parallel& parallel);
  /// Takes in the results of this home; afterwards the returned tensors are complete. Returns `owner`.
  std::shared_ptr<void> collect(Step& step);
  /// The step of that number; null where it is not under way.
  Step* find(uint64_t number);

  bool is_idle() const;
  /// From here on, steps are recorded, or fill a recording again. Null ends that and drops steps that are under way.
  void set_recording(Recording* recording);

  /// Functions that tests add to a step. `begun` is called when the step has begun, `ends` when it is about to give its
  /// slot back.
  struct Hooks {
    std::function<void(const Step&)> begun, ends;
  };
  void set_hooks(Hooks hooks) { hooks_ = std::move(hooks); }

 private:
  /// A range of key/value heads; query heads follow from it.
  struct KvHeads {
    int64_t begin = 0, end = 0;
  };
  template <class Row>
  static KvHeads heads_of(const Row& row) {
    return {row.kv_head_begin, row.kv_head_end};
  }

  // The parts of a step, whether calls of their own or not.
  Step& begin(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores, Part part);
  Step& begin(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
              const Parallel& parallel, Part part);
  Step& free_step();
  void open(Step& step, Part part);
  void dispatch_rows(const Step& step);
  void attend_rows(Step& step, const Parallel& parallel);
  void collect_rows(Step& step);

  void attend_groups(const Step& step, bool local, const Parallel& parallel);
  /// Adds to grads_ the runs that say where the key gradients of a group go, and returns them.
  std::span<const attention::KeyGradRun> add_gradient_runs(const Step& step, const plan::GroupRow& g);
  void retain_keys(const Step& step);
  void send_home(const Step& step, int64_t round);
  void receive_home(const Step& step, int64_t round);
  void fill_padding(const Step& step);
  void run_rows();
  void poison(const Step& step);

  Protocol& protocol_;
  Backend& backend_;
  Hooks hooks_;
  Recording* recording_ = nullptr;
  std::vector<Step> steps_;  // kNumSlots of them

  // Scratch of one computation. It only grows.
  std::vector<attention::KeyGroup> groups_;
  std::vector<attention::Task> tasks_;
  std::vector<attention::KeyGradRun> grads_;
  ReduceTable reduce_table_;
  std::vector<RowWork> rows_;
};

/// The state of a step from its dispatch until it is collected.
struct DISTCA_EXPORT Dispatcher::Step {
  enum class State { kFree, kDispatched, kAttended };

  State state = State::kFree;
  StepId id;
  plan::SliceView slice{{}};
  ScoreOptions scores;
  HeadShape heads;
  std::byte* arena = nullptr;
  std::byte* retained = nullptr;
  /// The place of each tensor of this rank, by TensorKind. Null if the step does not have the tensor.
  std::array<RowView, static_cast<size_t>(plan::TensorKind::kCount)> tensors = {};
  std::shared_ptr<std::byte> delta;  // for backward steps; only grows
  int64_t delta_bytes = 0;
  int64_t num_rounds = 0;  // in which this rank takes part
  bool more = false;       // whether a round comes after the one at hand
  std::shared_ptr<void> owner;

  plan::Phase phase() const { return id.phase; }
  /// The kinds of the tensors that the step returns.
  std::span<const plan::TensorKind> returned() const;
  KvHeads all_heads() const { return {0, heads.kv_heads}; }
  /// The format of rows of a range of heads in an arena.
  plan::RowFormat format(plan::Direction direction, plan::TensorKind kind, const KvHeads& range) const;
  RowView in_arena(plan::Direction direction, plan::TensorKind kind, const KvHeads& range, int64_t offset) const;
  /// Keys or values in the retained memory, where they lie as in the arena of a forward step.
  RowView in_retained(plan::TensorKind kind, const KvHeads& range, int64_t offset) const;
  RowExtent extent(plan::Direction direction, plan::TensorKind kind, const KvHeads& range, int64_t num_rows) const;
  void set(plan::TensorKind kind, const RowView& view) { tensors[static_cast<size_t>(kind)] = view; }
  const RowView& local(plan::TensorKind kind) const { return tensors[static_cast<size_t>(kind)]; }
  /// A tensor of this rank, from a row on and from the first head of the range on.
  RowView local(plan::TensorKind kind, const KvHeads& range, int64_t row) const;
};

}  // namespace distca::runtime
