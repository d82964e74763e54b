// A backend that does not compute attention but takes the time that it would: many ranks on a machine of few cores, for
// benchmarks of schedules.
#pragma once

#include <memory>

#include "plan/cost.h"
#include "runtime/backend.h"

namespace distca::emulation {

/// What a pass of attention takes: a cost for each query head of a task, and the time of its unit.
struct ReplayedPass {
  plan::CostModel cost;
  double unit_ns = 0;
};

/// The CPU's, but that `forward` and `backward` sleep and write nothing.
DISTCA_EXPORT std::shared_ptr<runtime::Backend> make_replay_backend(const ReplayedPass& forward,
                                                                    const ReplayedPass& backward);

}  // namespace distca::emulation
