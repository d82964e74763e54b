#include "runtime/queued_backend.h"

#include <utility>
#include <vector>

namespace distca::runtime {
namespace {

/// A problem with tables of its own.
class KeptProblem {
 public:
  explicit KeptProblem(const attention::Problem& problem)
      : problem_(problem),
        groups_(problem.groups.begin(), problem.groups.end()),
        tasks_(problem.tasks.begin(), problem.tasks.end()) {
    for (attention::KeyGroup& g : groups_) {
      g.blocks = blocks_.emplace_back(g.blocks.begin(), g.blocks.end());
      g.grads = grads_.emplace_back(g.grads.begin(), g.grads.end());
      if (g.sinks == nullptr) continue;
      g.sinks = sinks_.emplace_back(g.sinks, g.sinks + g.kv_heads * problem.heads.group_heads()).data();
    }
  }

  attention::Problem problem() const {
    attention::Problem kept = problem_;
    kept.groups = groups_;
    kept.tasks = tasks_;
    return kept;
  }

 private:
  attention::Problem problem_;
  std::vector<attention::KeyGroup> groups_;
  std::vector<attention::Task> tasks_;
  std::vector<std::vector<int64_t>> blocks_;  // moving a vector leaves what it holds where it is
  std::vector<std::vector<attention::KeyGradRun>> grads_;
  std::vector<std::vector<float>> sinks_;
};

class QueuedBackend final : public Backend {
 public:
  explicit QueuedBackend(std::shared_ptr<transport::HostStreams> streams)
      : cpu_(make_backend("cpu", "auto")), streams_(std::move(streams)) {}

  std::string device() const override { return cpu_->device(); }
  std::string attention(const HeadShape& heads) const override { return cpu_->attention(heads); }
  bool plan_independent(const HeadShape& heads) const override { return cpu_->plan_independent(heads); }
  void check(const HeadShape& heads, float softcap) const override { cpu_->check(heads, softcap); }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return cpu_->allocate(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    queue([=](Backend& cpu) { cpu.copy(to, from, n); });
  }
  void finish() override { streams_->hand_over(); }
  void reduce(const ReduceTable& table, DType dtype) override {
    queue([table, dtype](Backend& cpu) { cpu.reduce(table, dtype); });
  }
  void fill(const RowView& rows, const RowExtent& n, Fill value) override {
    queue([=](Backend& cpu) { cpu.fill(rows, n, value); });
  }
  void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
               const Parallel&) override {
    queue([=](Backend& cpu) { cpu.row_dot(heads, num_rows, out, dout, delta, Parallel()); });
  }
  // The caller's threads may be gone when its turn comes.
  void forward(const attention::Problem& problem, const Parallel&) override {
    queue([kept = std::make_shared<KeptProblem>(problem)](Backend& cpu) { cpu.forward(kept->problem(), Parallel()); });
  }
  void backward(const attention::Problem& problem, const Parallel&) override {
    queue([kept = std::make_shared<KeptProblem>(problem)](Backend& cpu) { cpu.backward(kept->problem(), Parallel()); });
  }

 private:
  template <class Work>
  void queue(Work work) {
    streams_->queue(transport::Streams::Stream::kWork, [this, work = std::move(work)] { work(*cpu_); });
  }

  std::shared_ptr<Backend> cpu_;
  std::shared_ptr<transport::HostStreams> streams_;
};

}  // namespace

std::shared_ptr<Backend> make_queued_backend(std::shared_ptr<transport::HostStreams> streams) {
  return std::make_shared<QueuedBackend>(std::move(streams));
}

}  // namespace distca::runtime
