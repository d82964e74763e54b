// Steps that are done again and again, as a device replays a graph of kernels, each time with other plans: the same
// operations over the same tensors, whose tables are filled anew in between.
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
#include "transport/tape.h"

namespace distca::runtime {

/// Of one context, which alone changes it.
class Recording {
 public:
  struct Step {
    HeadShape heads;
    int64_t num_rows;
    uint64_t number;  // of the step as it is recorded, or as it is next
    plan::Phase phase;
    const std::byte* lse;       // which a forward step returns and its backward step is given
    plan::SliceView slice{{}};  // while the recording is filled again
  };
  /// A call about a step, as it is made again.
  using Call = std::function<void(Step& step)>;

  Recording(double headroom, int64_t least_rounds)
      : tape_(std::make_shared<transport::Tape>(headroom)), least_rounds_(least_rounds) {}

  const std::shared_ptr<transport::Tape>& tape() const { return tape_; }
  std::span<const Step> steps() const { return steps_; }
  /// The forward step of a backward step, where both are here and have rows; otherwise the step itself.
  size_t forward_of(size_t step) const;

  /// The first call about a step. `owner` keeps alive what it views, but for the slice.
  void add(Step step, Call call, std::shared_ptr<void> owner);
  /// A further one, about the step that was recorded under that number.
  void add(uint64_t number, Call call);
  void complete() {
    is_complete_ = true;
    tape_->rewind();
  }

  /// Makes all calls again, with a slice for each step. Throws CapacityError where one does not fit.
  void refill(std::span<const plan::SliceView> slices);
  /// Memory that a step is recorded with, and goes on to use: of the step that comes next.
  std::shared_ptr<std::byte> memory_of_next_step(int64_t bytes, Memory& memory);
  /// Rounds that the next step goes through: as many as it needs, or the least there are to be; later, as many as it
  /// was recorded with. CapacityError where these are fewer.
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
  std::vector<std::shared_ptr<std::byte>> memory_;  // likewise; null where it needs none
  std::vector<NumberedCall> calls_;
  std::vector<std::shared_ptr<void>> owners_;
  bool is_complete_ = false;
  size_t num_begun_ = 0;
};

}  // namespace distca::runtime
