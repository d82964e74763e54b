#include "runtime/device_backend.h"

#include <utility>

#include "runtime/check.h"
#include "runtime/rows.h"

namespace distca::cuda {
namespace {

/// Makes a device the calling thread's current one, and then again the one it was.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "the current device");
    if (device != before_) check(cudaSetDevice(device), "another device");
  }
  ~DeviceGuard() { static_cast<void>(cudaSetDevice(before_)); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

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
  DeviceBackend(std::shared_ptr<runtime::Backend> aten, int device, runtime::CurrentStream current_stream)
      : aten_(std::move(aten)), device_(device), current_stream_(current_stream) {}

  std::string device() const override { return aten_->device(); }
  std::string attention(const HeadShape& heads) const override { return aten_->attention(heads); }
  bool plan_independent(const HeadShape& heads) const override { return aten_->plan_independent(heads); }
  void check(const HeadShape& heads, float softcap) const override { aten_->check(heads, softcap); }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return aten_->allocate(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    const DeviceGuard guard(device_);
    copy_rows(to, from, n, stream());
  }
  void finish() override {
    const DeviceGuard guard(device_);
    cuda::check(cudaStreamSynchronize(stream()), "work on the GPU");
  }

  void accumulate(const RowView& sum, const RowView& partial, const RowExtent& n, bool assign) override {
    if (assign) return copy(sum, partial, n);
    const DeviceGuard guard(device_);
    add_rows(sum, partial, n, stream());
  }
  void cast(const RowView& to, DType dtype, const RowView& from, const RowExtent& n) override {
    const DeviceGuard guard(device_);
    cast_rows(to, dtype, from, n, stream());
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
    aten_->forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    aten_->backward(problem, parallel);
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(current_stream_(device_)); }

  std::shared_ptr<runtime::Backend> aten_;
  int device_;
  runtime::CurrentStream current_stream_;
};

}  // namespace

std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream) {
  return std::make_shared<DeviceBackend>(std::move(aten), device, current_stream);
}

}  // namespace distca::cuda
