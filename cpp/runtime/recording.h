// A recording is a sequence of steps that is done again and again, each time with other plans, as a device replays a
// graph of kernels. The operations and their tensors stay the same. Their tables are filled anew each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "common/dtype.h"
#include "common/memory.h"
#include "plan/tables.h"
#include "runtime/protocol.h"
#include "transport/tape.h"

namespace distca::runtime {

/// A recording belongs to one context, which alone changes it.
class Recording {
 public:
  struct Step {
    HeadShape heads;
    int64_t num_rows;
    ScoreOptions scores;  // of the call; those that a plan says come from its slice
    uint64_t number;      // of the step: while it was recorded, then when it comes next
    plan::Phase phase;
    const std::byte* lse;       // returned by a forward step, and given to its backward step
    plan::SliceView slice{{}};  // set while the recording is filled again
  };
  /// Makes a call about a step again.
  using Call = std::function<void(Step& step)>;

  Recording(double headroom, int64_t least_rounds)
      : tape_(std::make_shared<transport::Tape>(headroom)), least_rounds_(least_rounds) {}

  const std::shared_ptr<transport::Tape>& tape() const { return tape_; }
  std::span<const Step> steps() const { return steps_; }
  /// The forward step of a backward step, if both are recorded and have rows. Otherwise the step itself.
  size_t forward_of(size_t step) const;

  /// Adds the first call about a step. `owner` keeps alive all that the call views, except the slice.
  void add(Step step, Call call, std::shared_ptr<void> owner);
  /// Adds a further call, about the step that was recorded under that number.
  void add(uint64_t number, Call call);
  void complete() {
    is_complete_ = true;
    tape_->rewind();
  }

  /// Makes all calls again, with a slice for each step. Throws CapacityError if one does not fit.
  void refill(std::span<const plan::SliceView> slices);
  /// The memory of the step that comes next. The step is recorded with it and keeps using it.
  std::shared_ptr<std::byte> memory_of_next_step(int64_t bytes, Memory& memory);
  /// The number of rounds that the next step goes through. While recording it is what the step needs, but at least
  /// `least_rounds`. Later it is what the step was recorded with; throws CapacityError if the step needs more.
  int64_t rounds_of_next_step(int64_t needed);

 private:
  struct NumberedCall {
    size_t step;
    Call call;
  };

  std::shared_ptr<transport::Tape> tape_;
  int64_t least_rounds_;
  std::vector<Step> steps_;
  std::vector<int64_t> num_rounds_;                 // of each step
  std::vector<std::shared_ptr<std::byte>> memory_;  // of each step; null where it needs none
  std::vector<NumberedCall> calls_;
  std::vector<std::shared_ptr<void>> owners_;
  bool is_complete_ = false;
  size_t num_begun_ = 0;
};

}  // namespace distca::runtime
