#include "emulation/sleeping_backend.h"

#include <sys/prctl.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "emulation/wrapping_backend.h"

namespace distca::emulation {

using namespace runtime;

namespace {

class SleepingBackend final : public WrappingBackend {
 public:
  SleepingBackend(const ReplayedPass& forward, const ReplayedPass& backward)
      : WrappingBackend(make_backend("cpu", "auto")), forward_(forward), backward_(backward) {}

  std::string attention(const HeadShape&) const override { return "replayed"; }
  bool plan_independent(const HeadShape&) const override { return false; }
  void forward(const attention::Problem& problem, const Parallel&) override { sleep(forward_, problem); }
  void backward(const attention::Problem& problem, const Parallel&) override { sleep(backward_, problem); }

 private:
  static void sleep(const ReplayedPass& pass, const attention::Problem& problem) {
    const auto begin = std::chrono::steady_clock::now();
    double units = 0;
    for (const attention::Task& task : problem.tasks) {
      const attention::KeyGroup& group = problem.groups[static_cast<size_t>(task.group)];
      const int64_t heads = group.kv_heads * problem.heads.group_heads();
      const plan::Document document = {group.kv_end, problem.scores_of(group).mask};
      units += static_cast<double>(heads * pass.cost.cost(document, task.q_begin, task.q_end));
    }
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // for this thread: sleeps end when they should, not 50 us later
    std::this_thread::sleep_until(begin + std::chrono::nanoseconds(std::llround(units * pass.unit_ns)));
  }

  ReplayedPass forward_, backward_;
};

}  // namespace

std::shared_ptr<Backend> make_sleeping_backend(const ReplayedPass& forward, const ReplayedPass& backward) {
  for (const ReplayedPass* pass : {&forward, &backward}) {
    pass->cost.check();
    require(std::isfinite(pass->unit_ns) && pass->unit_ns > 0, "replay: a unit of ", pass->unit_ns,
            " ns; a positive number is expected");
  }
  return std::make_shared<SleepingBackend>(forward, backward);
}

}  // namespace distca::emulation
