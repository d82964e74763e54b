// A backend that does not compute attention but takes the time that it would take. With it, benchmarks of schedules
// have many ranks on a machine of few cores.
#pragma once

#include <memory>

#include "plan/cost.h"
#include "runtime/backend.h"

namespace distca::emulation {

/// The time of a pass of attention: a cost for each query head of a task, and the time of a unit of cost.
struct ReplayedPass {
  plan::CostModel cost;
  double unit_ns = 0;
};

/// Makes a backend that is the CPU's, except that `forward` and `backward` sleep and write nothing.
DISTCA_EXPORT std::shared_ptr<runtime::Backend> make_sleeping_backend(const ReplayedPass& forward,
                                                                      const ReplayedPass& backward);

}  // namespace distca::emulation
