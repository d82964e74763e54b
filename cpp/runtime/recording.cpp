#include "runtime/recording.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace distca::runtime {

void Recording::add(Step step, Call call, std::shared_ptr<void> owner) {
  step.slice = plan::SliceView({});
  calls_.push_back({steps_.size(), std::move(call)});
  steps_.push_back(step);
  // A graph that is captured uses memory again as the recorded calls did.
  if (!tape_->is_captured()) owners_.push_back(std::move(owner));
}

void Recording::add(uint64_t number, Call call) {
  const auto found = std::find_if(steps_.begin(), steps_.end(), [&](const Step& s) { return s.number == number; });
  calls_.push_back({static_cast<size_t>(found - steps_.begin()), std::move(call)});
}

size_t Recording::forward_of(size_t step) const {
  const Step& s = steps_[step];
  if (s.phase == plan::Phase::kForward || s.num_rows == 0) return step;
  size_t i = step;  // the last one before it, because memory may be used again
  while (i > 0 && (steps_[i].phase == plan::Phase::kBackward || steps_[i].lse != s.lse)) --i;
  return steps_[i].phase == plan::Phase::kForward && steps_[i].lse == s.lse ? i : step;
}

void Recording::refill(std::span<const plan::SliceView> slices) {
  num_begun_ = 0;
  tape_->rewind();
  for (const NumberedCall& c : calls_) {
    Step& step = steps_[c.step];
    step.slice = slices[c.step];
    try {
      c.call(step);
    } catch (const CapacityError& error) {
      throw CapacityError(message("replan, step ", c.step, " of the recording: ", error.what()));
    }
  }
}

std::shared_ptr<std::byte> Recording::memory_of_next_step(int64_t bytes, Memory& memory) {
  const size_t step = is_complete_ ? num_begun_ : num_rounds_.size();
  if (memory_.size() <= step) memory_.resize(step + 1);
  if (!memory_[step]) memory_[step] = memory.allocate(bytes);
  return memory_[step];
}

int64_t Recording::rounds_of_next_step(int64_t needed) {
  if (!is_complete_) {
    num_rounds_.push_back(std::max(needed, least_rounds_));
    return num_rounds_.back();
  }
  const int64_t recorded = num_rounds_[num_begun_++];
  require<CapacityError>(needed <= recorded, "plan needs ", needed, " rounds, the recording has ", recorded,
                         "; record with a plan that has more of them, or with more rounds");
  return recorded;
}

}  // namespace distca::runtime
