#include "runtime/device_backend.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "attention/cuda_attention.h"
#include "runtime/capability.h"
#include "runtime/check.h"
#include "runtime/device_guard.h"
#include "runtime/device_queue.h"
#include "runtime/home_rows.h"
#include "transport/cuda_streams.h"
#include "transport/put.h"
#include "transport/reduce.h"

namespace distca::cuda {
namespace {

using attention::cuda::KernelFamily;
using transport::fixed_value;
using transport::Streams;
using transport::table_part;
using transport::table_value;
using transport::TablePart;

/// Bytes of the constant rows that fills copy from.
constexpr int64_t kConstantBytes = 4096;
/// Without streams nothing is recorded, and therefore nobody waits for a graph.
constexpr std::chrono::milliseconds kNoTimeout{0};

constexpr std::array kFills = {runtime::Fill::kZero, runtime::Fill::kNan, runtime::Fill::kMinusInfinity};

uint32_t word_of(runtime::Fill value) {
  switch (value) {
    case runtime::Fill::kZero:
      return 0;
    case runtime::Fill::kNan:
      return 0xffffffffu;  // NaN in every dtype
    case runtime::Fill::kMinusInfinity:
      return 0xff800000u;
  }
  return 0;
}

/// The arguments of row_delta. They must be the same in each replay.
struct RowDeltaArguments {
  int64_t q_heads, v_dim, dtype, num_rows;
  attention::DeltaRows rows;
};

/// The arguments of add_sinks. They must be the same in each replay.
struct AddSinksArguments {
  int64_t q_heads, v_dim, dtype, num_rows;
  RowView out, lse;
  const float* sinks;
};

/// The arguments of largest that must be the same in each replay.
struct LargestArguments {
  int64_t n;
  float* to;
};

constexpr int kLeastCapability = 8;  // the oldest that the kernels are compiled for (cuda/cuda.cmake)

class DeviceBackend final : public runtime::Backend {
 public:
  DeviceBackend(std::shared_ptr<runtime::Backend> aten, int device, runtime::CurrentStream current_stream,
                bool own_attention, std::shared_ptr<DeviceQueue> queue, int sms_of_puts)
      : aten_(std::move(aten)),
        device_(device),
        own_attention_(own_attention),
        queue_(std::move(queue)),
        sms_of_puts_(sms_of_puts) {
    const DeviceGuard guard(device_);
    if (!queue_) queue_ = std::make_shared<DeviceQueue>(device, current_stream, kNoTimeout);
    const auto [major, minor] = capability_of(device);
    require<DeviceError>(major >= kLeastCapability, "cuda:", device, " has compute capability ", major, ".", minor,
                         "; distca needs ", kLeastCapability, ".0 or later");
    family_ = attention::cuda::family_of(major, minor);
    load_reduce_kernels();
    load_home_row_kernels();
    if (own_attention_) attention::cuda::load_kernels(family_);
    make_constants();
  }

  std::string device() const override { return aten_->device(); }
  std::string attention(const HeadShape& heads) const override {
    if (!own_attention_) return aten_->attention(heads);
    return family_ == KernelFamily::kHopper ? "distca's kernels for compute capability 9.0"
                                            : "distca's kernels for compute capability 8.0 and later";
  }
  bool plan_independent(const HeadShape&) const override { return own_attention_; }
  bool takes_gradient_of_lse() const override { return own_attention_ || aten_->takes_gradient_of_lse(); }
  void check(const HeadShape& heads, float softcap) const override {
    const std::string reason = attention::cuda::unsupported_reason(heads, family_);
    if (own_attention_) return require(reason.empty(), "attention = \"own\": ", reason);
    require(!queue_->is_recording(), "record: attention is ", aten_->attention(heads),
            ", which cannot be recorded; attention=\"own\" can");
    try {
      aten_->check(heads, softcap);
    } catch (const InvalidArgumentError& error) {
      require(!reason.empty(), error.what(), "; distca's own kernels take it: attention=\"own\"");
      throw;
    }
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return aten_->allocate(bytes); }
  std::shared_ptr<std::byte> scratch(int64_t bytes) override { return aten_->scratch(bytes); }
  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    const runtime::RowWork copy = {.to = to, .from = from, .n = n};
    run(std::span(&copy, 1));
  }
  void finish() override {
    const DeviceGuard guard(device_);
    cuda::check(cudaStreamSynchronize(queue_->stream(Streams::Stream::kWork)), "work on the GPU");
  }

  void reduce(const runtime::ReduceTable& table, DType dtype) override {
    const std::array parts = {table_value("chunks", table.num_chunks), table_part("sums", table.entries),
                              table_part("terms", table.terms)};
    queue("sum of gradients", parts,
          [dtype](const DeviceTable& t, cudaStream_t stream) { reduce_rows(t, dtype, stream); });
  }
  void fill(const RowView& rows, const RowExtent& n, runtime::Fill value) override {
    const runtime::RowWork fill = {
        .kind = runtime::RowWork::Kind::kFill, .to = rows, .from = {}, .n = n, .fill = value};
    run(std::span(&fill, 1));
  }
  /// Does all of it in one kernel.
  void run(std::span<const runtime::RowWork> rows) override {
    put_table_.clear();
    put_table_.open({.peer = -1});
    for (const runtime::RowWork& r : rows) {
      if (r.kind == runtime::RowWork::Kind::kCopy)
        put_table_.add(r.to, r.from, r.n);
      else
        add_fill(r);
    }
    queue("batch of rows", put_parts_.of(put_table_),
          [](const DeviceTable& t, cudaStream_t stream) { copy_extents(t, stream); });
  }
  void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, const Parallel&) override {
    const RowDeltaArguments arguments = {heads.q_heads, heads.v_dim, static_cast<int64_t>(heads.dtype), num_rows, rows};
    queue("row delta", std::array{fixed_value("rows", arguments)},
          [=](const DeviceTable&, cudaStream_t stream) { cuda::row_delta(heads, num_rows, rows, stream); });
  }
  void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
                 const Parallel&) override {
    const AddSinksArguments arguments = {heads.q_heads, heads.v_dim, static_cast<int64_t>(heads.dtype), num_rows, out,
                                         lse,           sinks};
    queue("sinks", std::array{fixed_value("rows", arguments)},
          [=](const DeviceTable&, cudaStream_t stream) { cuda::add_sinks(heads, num_rows, out, lse, sinks, stream); });
  }

  bool finds_max_logits() const override { return own_attention_; }
  void largest(std::span<const float* const> terms, int64_t n, float* to) override {
    const LargestArguments arguments = {n, to};
    queue("largest scores", std::array{fixed_value("heads", arguments), table_part("terms", terms)},
          [=](const DeviceTable& t, cudaStream_t stream) { cuda::largest(t, 1, n, to, stream); });
  }

  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    if (!own_attention_) return aten_->forward(problem, parallel);
    kernels().prepare_forward(problem);
    attend("forward");
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    if (!own_attention_) return aten_->backward(problem, parallel);
    kernels().prepare_backward(problem, problem.deterministic);
    attend("backward");
  }

 private:
  template <class Launch>
  void queue(const char* operation, std::span<const TablePart> parts, const Launch& launch) {
    queue_->run(Streams::Stream::kWork, operation, parts, launch);
  }

  /// The launcher. It is made for the first problem, because it asks the driver for a function that old drivers lack.
  attention::cuda::CudaAttention& kernels() {
    if (!kernels_) kernels_.emplace(device_).leave_room(sms_of_puts_);
    return *kernels_;
  }

  /// Starts what was prepared last.
  void attend(const char* operation) {
    const attention::cuda::AttentionLaunch launch = kernels_->launch();
    const std::span<const TablePart> tables = kernels_->parts();
    if (tables[0].count() == 0 && !queue_->is_recording()) return;
    parts_.assign(tables.begin(), tables.end());
    const attention::cuda::AttentionLaunch::Kind kind = launch.kind();
    parts_.push_back(fixed_value("mask, scores or heads", kind));
    // Each start has scratch memory of its own, because two starts may be under way at once, on two streams.
    queue(operation, parts_, [launch, aten = aten_](const DeviceTable& t, cudaStream_t stream) {
      const auto bytes = static_cast<int64_t>(launch.scratch_bytes(*t.layout));
      launch(t, aten->scratch(bytes).get(), stream);
    });
  }

  void make_constants() {
    const DeviceGuard guard(device_);
    for (const runtime::Fill value : kFills) {
      const std::vector<uint32_t> words(kConstantBytes / sizeof(uint32_t), word_of(value));
      std::shared_ptr<std::byte>& row = constants_[static_cast<size_t>(value)];
      row = aten_->allocate(kConstantBytes);
      finish();  // allocate may fill it
      cuda::check(cudaMemcpy(row.get(), words.data(), kConstantBytes, cudaMemcpyHostToDevice), "filling rows");
    }
    // A copy from memory that is not page-locked may go on after the call, and streams do not wait for it.
    cuda::check(cudaStreamSynchronize(nullptr), "filling rows");
  }
  /// Adds a fill: a copy from a constant row whose strides are zero. Heads that are longer than that row are filled in
  /// pieces.
  void add_fill(const runtime::RowWork& r) {
    const RowView from = {constants_[static_cast<size_t>(r.fill)].get(), 0, 0};
    if (r.n.head_bytes <= kConstantBytes) return put_table_.add(r.to, from, r.n);
    require(r.n.num_rows == 1 && r.n.num_heads == 1, "rows with heads of ", r.n.head_bytes, " bytes are to be filled");
    const int64_t pieces = r.n.head_bytes / kConstantBytes, done = pieces * kConstantBytes;
    put_table_.add({r.to.data, kConstantBytes, kConstantBytes}, from, {pieces, 1, kConstantBytes});
    put_table_.add({r.to.data + done, 0, 0}, from, {1, 1, r.n.head_bytes - done});
  }

  std::shared_ptr<runtime::Backend> aten_;
  int device_;
  bool own_attention_;
  std::shared_ptr<DeviceQueue> queue_;
  int sms_of_puts_;
  KernelFamily family_;
  std::optional<attention::cuda::CudaAttention> kernels_;
  std::array<std::shared_ptr<std::byte>, 3> constants_;  // by Fill: a row of that value

  // Scratch of one call.
  transport::PutTable put_table_;
  PutParts put_parts_;
  std::vector<TablePart> parts_;
};

}  // namespace

std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream, bool own_attention,
                                                      const std::shared_ptr<transport::Streams>& streams) {
  return std::make_shared<DeviceBackend>(std::move(aten), device, current_stream, own_attention, queue_of(streams),
                                         sms_of_puts(streams));
}

}  // namespace distca::cuda
