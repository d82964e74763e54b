#include "runtime/replay_backend.h"

#include <sys/prctl.h>

#include <chrono>
#include <cmath>
#include <thread>

namespace distca::runtime {
namespace {

class ReplayBackend final : public Backend {
 public:
  ReplayBackend(const ReplayedPass& forward, const ReplayedPass& backward)
      : forward_(forward), backward_(backward), cpu_(make_backend("cpu", "auto")) {}

  std::string device() const override { return cpu_->device(); }
  std::string attention(const HeadShape&) const override { return "replayed"; }
  bool plan_independent(const HeadShape&) const override { return false; }
  void check(const HeadShape& heads, float softcap) const override { cpu_->check(heads, softcap); }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return cpu_->allocate(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override { cpu_->copy(to, from, n); }
  void finish() override { cpu_->finish(); }
  void reduce(const ReduceTable& table, DType dtype) override { cpu_->reduce(table, dtype); }
  void fill(const RowView& rows, const RowExtent& n, Fill value) override { cpu_->fill(rows, n, value); }
  void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
               const Parallel& parallel) override {
    cpu_->row_dot(heads, num_rows, out, dout, delta, parallel);
  }
  void forward(const attention::Problem& problem, const Parallel&) override { sleep(forward_, problem); }
  void backward(const attention::Problem& problem, const Parallel&) override { sleep(backward_, problem); }

 private:
  static void sleep(const ReplayedPass& pass, const attention::Problem& problem) {
    const auto begin = std::chrono::steady_clock::now();
    double units = 0;
    for (const attention::Task& task : problem.tasks) {
      const attention::KeyGroup& group = problem.groups[static_cast<size_t>(task.group)];
      const int64_t heads = group.kv_heads * problem.heads.group_heads();
      units += static_cast<double>(heads * pass.cost.cost(problem.mask, group.kv_end, task.q_begin, task.q_end));
    }
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // of this thread: sleeps end when they should, not 50 us later
    std::this_thread::sleep_until(begin + std::chrono::nanoseconds(std::llround(units * pass.unit_ns)));
  }

  ReplayedPass forward_, backward_;
  std::shared_ptr<Backend> cpu_;
};

}  // namespace

std::shared_ptr<Backend> make_replay_backend(const ReplayedPass& forward, const ReplayedPass& backward) {
  for (const ReplayedPass* pass : {&forward, &backward}) {
    pass->cost.check();
    require(std::isfinite(pass->unit_ns) && pass->unit_ns > 0, "replay: a unit of ", pass->unit_ns,
            " ns; a positive number is expected");
  }
  return std::make_shared<ReplayBackend>(forward, backward);
}

}  // namespace distca::runtime
