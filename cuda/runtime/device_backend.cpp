#include "runtime/device_backend.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "attention/cuda_attention.h"
#include "runtime/check.h"
#include "runtime/device_guard.h"
#include "runtime/rows.h"
#include "transport/reduce.h"
#include "transport/table_ring.h"

namespace distca::cuda {
namespace {

uint32_t word_of(runtime::Fill value) {
  switch (value) {
    case runtime::Fill::kZero:
      return 0;
    case runtime::Fill::kNan:
      return 0xffffffffu;  // in every dtype
    case runtime::Fill::kMinusInfinity:
      return 0xff800000u;
  }
  return 0;
}

class DeviceBackend final : public runtime::Backend {
 public:
  DeviceBackend(std::shared_ptr<runtime::Backend> aten, int device, runtime::CurrentStream current_stream,
                bool own_attention)
      : aten_(std::move(aten)), device_(device), current_stream_(current_stream), own_attention_(own_attention) {
    cuda::check(cudaDeviceGetAttribute(&major_, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
    cuda::check(cudaDeviceGetAttribute(&minor_, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  }

  std::string device() const override { return aten_->device(); }
  std::string attention(const HeadShape& heads) const override {
    return plan_independent(heads) ? "distca's kernels for compute capability 9.0" : aten_->attention(heads);
  }
  bool plan_independent(const HeadShape& heads) const override {
    return own_attention_ && attention::cuda::unsupported_reason(heads, major_, minor_).empty();
  }
  void check(const HeadShape& heads, float softcap) const override {
    if (!plan_independent(heads)) aten_->check(heads, softcap);
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return aten_->allocate(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    const DeviceGuard guard(device_);
    copy_rows(to, from, n, stream());
  }
  void finish() override {
    const DeviceGuard guard(device_);
    cuda::check(cudaStreamSynchronize(stream()), "work on the GPU");
  }

  void reduce(const runtime::ReduceTable& table, DType dtype) override {
    const DeviceGuard guard(device_);
    const cudaStream_t on = stream();
    const auto [entries, terms] =
        tables_.upload<2>({std::as_bytes(std::span(table.entries)), std::as_bytes(std::span(table.terms))}, on);
    reduce_rows({reinterpret_cast<const runtime::ReduceEntry*>(entries), reinterpret_cast<const float* const*>(terms),
                 static_cast<int32_t>(table.entries.size()), table.num_chunks},
                dtype, on);
    tables_.done(on);
  }
  void fill(const RowView& rows, const RowExtent& n, runtime::Fill value) override {
    const DeviceGuard guard(device_);
    fill_rows(rows, n, word_of(value), stream());
  }
  void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
               const Parallel&) override {
    const DeviceGuard guard(device_);
    cuda::row_dot(heads, num_rows, out, dout, delta, stream());
  }

  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    if (!plan_independent(problem.heads)) return aten_->forward(problem, parallel);
    const DeviceGuard guard(device_);
    run(kernels().prepare_forward(with_sinks_on_device(problem)));
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    if (!plan_independent(problem.heads)) return aten_->backward(problem, parallel);
    const DeviceGuard guard(device_);
    run(kernels().prepare_backward(with_sinks_on_device(problem), problem.deterministic));
  }

 private:
  /// Memory of the device that only grows. What reads it was started on the same stream as what writes it next.
  struct Buffer {
    std::shared_ptr<std::byte> data;
    int64_t bytes = 0;

    std::byte* of(int64_t wanted, runtime::Backend& memory) {
      if (wanted > bytes) {
        data = memory.allocate(wanted);
        bytes = wanted;
      }
      return data.get();
    }
  };

  cudaStream_t stream() const { return static_cast<cudaStream_t>(current_stream_(device_)); }

  /// Made for the first problem: it asks the driver for what old ones lack.
  attention::cuda::CudaAttention& kernels() {
    if (!kernels_) kernels_.emplace(device_);
    return *kernels_;
  }

  void run(size_t scratch_bytes) { kernels().run(scratch_.of(static_cast<int64_t>(scratch_bytes), *aten_), stream()); }

  /// The kernels read sinks on the device. Those of all groups are parts of one vector.
  attention::Problem with_sinks_on_device(const attention::Problem& problem) {
    const float *first = nullptr, *last = nullptr;
    for (const attention::KeyGroup& g : problem.groups) {
      if (g.sinks == nullptr) continue;
      const float* const end = g.sinks + g.kv_heads * problem.heads.group_heads();
      first = first == nullptr ? g.sinks : std::min(first, g.sinks);
      last = last == nullptr ? end : std::max(last, end);
    }
    if (first == nullptr) return problem;
    const auto bytes = static_cast<int64_t>(sizeof(float)) * (last - first);
    auto* const on_device = reinterpret_cast<float*>(sinks_.of(bytes, *aten_));
    cuda::check(cudaMemcpyAsync(on_device, first, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream()),
                "copying sinks");
    groups_.assign(problem.groups.begin(), problem.groups.end());
    for (attention::KeyGroup& g : groups_)
      if (g.sinks != nullptr) g.sinks = on_device + (g.sinks - first);
    attention::Problem moved = problem;
    moved.groups = groups_;
    return moved;
  }

  std::shared_ptr<runtime::Backend> aten_;
  int device_;
  runtime::CurrentStream current_stream_;
  bool own_attention_;
  int major_ = 0, minor_ = 0;
  std::optional<attention::cuda::CudaAttention> kernels_;
  Buffer scratch_, sinks_;
  TableRing tables_;
  std::vector<attention::KeyGroup> groups_;
};

}  // namespace

std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream, bool own_attention) {
  return std::make_shared<DeviceBackend>(std::move(aten), device, current_stream, own_attention);
}

}  // namespace distca::cuda
