#include "runtime/backend.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "runtime/cuda_library.h"
#include "runtime/row_arithmetic.h"

namespace distca::runtime {
namespace {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::string_view isa) : kernel_(isa) {}

  std::string device() const override { return "cpu"; }
  std::string attention(const HeadShape&) const override { return std::string("CPU kernel, ") + kernel_.isa(); }
  bool plan_independent(const HeadShape&) const override { return true; }
  void check(const HeadShape&, float) const override {}

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return zeroed_host_memory(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override { copy_rows(to, from, n); }
  void finish() override {}

  void reduce(const ReduceTable& table, DType dtype) override { reduce_on_host(table, dtype); }
  void fill(const RowView& rows, const RowExtent& n, Fill value) override {
    if (value != Fill::kMinusInfinity) return fill_bytes(rows, n, value == Fill::kZero ? 0 : kNanByte);
    for (int64_t i = 0; i < n.num_rows; ++i)
      for (int64_t head = 0; head < n.num_heads; ++head)
        *float_at(rows, i, head) = -std::numeric_limits<float>::infinity();
  }
  void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows,
                 const Parallel& parallel) override {
    attention::row_delta(heads, num_rows, rows, parallel);
  }
  void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
                 const Parallel& parallel) override {
    attention::add_sinks(heads, num_rows, out, lse, sinks, parallel);
  }
  void largest(std::span<const float* const> terms, int64_t n, float* to) override {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = terms[0][i];
      for (const float* term : terms.subspan(1))
        if (!(term[i] <= to[i]) && !std::isnan(to[i])) to[i] = term[i];
    }
  }
  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    kernel_.forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    kernel_.backward(problem, parallel);
  }

 private:
  static constexpr int kNanByte = 0xff;  // all ones is a NaN in every dtype

  attention::CpuAttention kernel_;
};

/// The factory is never destroyed, like the registry of contexts.
DeviceFactory& device_factory() {
  static auto* const instance = new DeviceFactory;
  return *instance;
}

constexpr const char* kVariable = "DISTCA_ATTENTION";

void check_choice(const char* what, std::string_view attention) {
  require(attention == "auto" || attention == "own" || attention == "flash", what, " = \"", attention,
          "\"; \"auto\", \"own\" and \"flash\" are allowed");
}

/// Whether this library's own kernels compute such heads on that device, "cuda:" and a number, where nobody chooses.
bool is_own_the_default(std::string_view device, const HeadShape& heads) {
  constexpr std::string_view kCuda = "cuda:";
  const CudaLibrary* const library = cuda_library();
  if (library == nullptr || !device.starts_with(kCuda)) return false;
  int index = -1;
  std::from_chars(device.data() + kCuda.size(), device.data() + device.size(), index);
  return index >= 0 && index < library->devices().count && library->is_own_the_default(index) &&
         library->own_attention_problem(heads, index).empty();
}

/// Checks device and attention. Returns whether the CPU's own kernel computes.
bool check_asked(const std::string& device, const std::string& attention) {
  check_choice("attention", attention);
  const bool by_cpu = device == "cpu" && attention != "flash";
  require(by_cpu || device_factory().backend != nullptr, "device \"", device, "\" with attention \"", attention,
          "\" needs the operators; import distca first");
  return by_cpu;
}

}  // namespace

void Backend::run(std::span<const RowWork> rows) {
  for (const RowWork& r : rows) {
    if (r.kind == RowWork::Kind::kCopy)
      copy(r.to, r.from, r.n);
    else
      fill(r.to, r.n, r.fill);
  }
}

std::string chosen_attention(std::optional<std::string_view> argument, std::string_view device,
                             const HeadShape& heads) {
  const char* const variable = std::getenv(kVariable);
  if (argument)
    check_choice("attention", *argument);
  else if (variable != nullptr)
    check_choice(kVariable, variable);
  if (device == "cpu") return argument == "flash" ? "flash" : "own";
  const std::string_view asked = argument.value_or(variable != nullptr ? variable : "auto");
  return asked == "own" || (asked == "auto" && is_own_the_default(device, heads)) ? "own" : "flash";
}

DeviceFactory set_device_factory(DeviceFactory those) { return std::exchange(device_factory(), std::move(those)); }

std::shared_ptr<Backend> make_backend(const std::string& device, const std::string& attention,
                                      std::string_view cpu_isa) {
  if (check_asked(device, attention)) return std::make_shared<CpuBackend>(cpu_isa);
  return device_factory().backend(device, attention, nullptr);
}

Device make_device(const std::string& device, const std::string& attention, std::chrono::milliseconds timeout,
                   int put_blocks) {
  require(!check_asked(device, attention), "the CPU's own kernel has no streams");
  const std::shared_ptr<transport::Streams> streams = device_factory().streams(device, timeout, put_blocks);
  return {device_factory().backend(device, attention, streams), streams};
}

}  // namespace distca::runtime
