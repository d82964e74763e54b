// A backend that writes down whether it was asked to be deterministic, and leaves the work to the CPU's own. Loaded
// into a process (test_deterministic.py), it is what contexts with attention="flash" compute with there.
#include <chrono>
#include <memory>
#include <string>

#include "emulation/wrapping_backend.h"

namespace distca::runtime {
namespace {

/// A letter for each call: f and b, or F and B where it is to be deterministic.
std::string& record() {
  static std::string calls;
  return calls;
}

class RecordingBackend final : public emulation::WrappingBackend {
 public:
  RecordingBackend() : WrappingBackend(make_backend("cpu", "auto")) {}

  std::string attention(const HeadShape&) const override { return "recorded"; }
  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    record() += problem.deterministic ? 'F' : 'f';
    WrappingBackend::forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    record() += problem.deterministic ? 'B' : 'b';
    WrappingBackend::backward(problem, parallel);
  }
};

}  // namespace
}  // namespace distca::runtime

extern "C" {

void record_attention() {
  using namespace distca;
  runtime::set_device_factory(
      {[](const std::string&, const std::string&, const std::shared_ptr<transport::Streams>&) {
         return std::make_shared<runtime::RecordingBackend>();
       },
       [](const std::string&, std::chrono::milliseconds, int) { return std::shared_ptr<transport::Streams>(); }});
}

/// The calls of this process since it forgot them.
const char* recorded_calls() { return distca::runtime::record().c_str(); }
void forget_calls() { distca::runtime::record().clear(); }
}
