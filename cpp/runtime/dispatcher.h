// The dispatcher runs one rank's slice of a plan over the transport. A forward step and a backward step are each done
// in three parts: dispatch, attend, collect. The parts are one call, or three, between which another step may go on in
// the other slot.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "plan/tables.h"
#include "runtime/arena.h"
#include "runtime/backend.h"
#include "runtime/protocol.h"
#include "runtime/recording.h"
#include "runtime/server_tasks.h"

namespace distca::runtime {

/// The tensors of this rank, [T, heads, dim] with T = the layout's rows of this rank. Inputs are never written.
struct ForwardTensors {
  RowView q, k, v;
  RowView out, lse;               // returned; lse [T, q_heads] fp32
  std::byte* retained = nullptr;  // returned too, as many bytes as the plan retains; null where no backward will come
  float* max_logits = nullptr;    // returned too, one for each query head; null where nobody asks
};
struct BackwardTensors {
  RowView q, k, v, out, lse, dout, dlse;  // without dlse.data, lse has no gradient
  std::byte* retained = nullptr;          // returned by the forward step; null where the plan retains nothing here
  RowView dq, dk, dv;                     // returned
};

class Dispatcher {
 public:
  Dispatcher(Protocol& protocol, Backend& backend);
  ~Dispatcher();

  /// Does a whole step, and returns its number.
  uint64_t forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                   const Parallel& parallel);
  uint64_t backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
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
  /// The step of that number, if `attend` (after dispatch) or `collect` (after attend) may come now, and if it is of
  /// that phase where one is given. Otherwise throws InvalidArgumentError.
  Step& step_for(Part part, uint64_t number, std::optional<plan::Phase> phase = {});
  /// Computes this server's tasks of the step, and sends home the first round of results.
  void attend(Step& step, const Parallel& parallel);
  /// Takes in the results of this home; afterwards the returned tensors are complete. Returns `owner`.
  std::shared_ptr<void> collect(Step& step, const Parallel& parallel);
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
  // The parts of a step, whether calls of their own or not.
  Step& begin(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores, Part part);
  Step& begin(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
              const Parallel& parallel, Part part);
  Step& free_step();
  void open(Step& step, Part part);
  void dispatch_rows(const Step& step);
  void attend_rows(Step& step, const Parallel& parallel);
  void collect_rows(Step& step, const Parallel& parallel);

  void attend_groups(const Step& step, Rounds rounds, const Parallel& parallel);
  bool rows_travel() const;
  void retain_keys(const Step& step);
  void put_max_logits(const Step& step, int64_t home);
  void find_max_logits(const Step& step);
  void find_last_home(const Step& step);
  void send_home(const Step& step, int64_t round, Rounds after);
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
  ServerTasks server_tasks_;
  ReduceTable reduce_table_;
  std::vector<RowWork> rows_;
  std::vector<int64_t> last_home_;  // by peer: the last `after` of the first round of results
  std::vector<const plan::SendRow*> homeward_;
  std::vector<const float*> max_logits_;
};

/// The state of a step from its dispatch until it is collected.
struct DISTCA_EXPORT Dispatcher::Step : Arena {
  enum class State { kFree, kDispatched, kAttended };

  State state = State::kFree;
  StepId id;
  plan::SliceView slice{{}};
  ScoreOptions scores;
  float* returned_max_logits = nullptr;
  /// Of backward steps. The last one is in use. Those before it were too short; work on any stream may still read them,
  /// and an allocator that knows one stream alone would give them to others.
  std::vector<std::shared_ptr<std::byte>> deltas;
  int64_t delta_bytes = 0;
  int64_t num_rounds = 0;  // in which this rank takes part
  int64_t checksum = 0;    // of the slice
  bool more = false;       // whether a round comes after the one at hand
  std::shared_ptr<void> owner;
};

}  // namespace distca::runtime
