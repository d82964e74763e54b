// A backend that writes down whether it was asked to be deterministic, and leaves the work to the CPU's own. Loaded
// into a process (test_deterministic.py), it is what contexts with attention="flash" compute with there.
#include <chrono>
#include <memory>
#include <string>

#include "runtime/backend.h"

namespace distca::runtime {
namespace {

/// A letter for each call: f and b, or F and B where it is to be deterministic.
std::string& record() {
  static std::string calls;
  return calls;
}

class RecordingBackend final : public Backend {
 public:
  std::string device() const override { return cpu_->device(); }
  std::string attention(const HeadShape&) const override { return "recorded"; }
  bool plan_independent(const HeadShape& heads) const override { return cpu_->plan_independent(heads); }
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
  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    record() += problem.deterministic ? 'F' : 'f';
    cpu_->forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    record() += problem.deterministic ? 'B' : 'b';
    cpu_->backward(problem, parallel);
  }

 private:
  std::shared_ptr<Backend> cpu_ = make_backend("cpu", "auto");
};

}  // namespace
}  // namespace distca::runtime

extern "C" {

void record_attention() {
  using namespace distca;
  runtime::set_makers(
      [](const std::string&, const std::string&, const std::shared_ptr<transport::Streams>&) {
        return std::make_shared<runtime::RecordingBackend>();
      },
      [](const std::string&, std::chrono::milliseconds, int) { return std::shared_ptr<transport::Streams>(); });
}

/// The calls of this process since it forgot them.
const char* recorded_calls() { return distca::runtime::record().c_str(); }
void forget_calls() { distca::runtime::record().clear(); }
}
