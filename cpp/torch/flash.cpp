#include "torch/flash.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "torch/aten.h"
#include "torch/gpu.h"

namespace distca::ops {
namespace {

using torch::headeronly::ScalarType;

/// The tasks as a batch of sequences, in the order of their query rows.
struct Batch {
  std::vector<int32_t> q_ends;     // where each sequence begins in q, and the end of the last one
  std::vector<int32_t> kv_begins;  // where each sequence begins in k; one more word at the end
  std::vector<int32_t> kv_lengths;
  std::vector<int64_t> q_index;  // rows of q in the batch's order; empty: all rows, in order
  bool own_keys = true;          // whether the sequences' keys are all rows of k, one after another
  int64_t max_q = 0, max_kv = 0;

  int64_t size() const { return static_cast<int64_t>(kv_lengths.size()); }
};

Batch make_batch(std::span<const LocalTask> tasks, int64_t q_rows, int64_t kv_rows) {
  std::vector<LocalTask> sorted(tasks.begin(), tasks.end());
  std::sort(sorted.begin(), sorted.end(), [](const LocalTask& a, const LocalTask& b) { return a.q_begin < b.q_begin; });
  require(std::max(q_rows, kv_rows) <= std::numeric_limits<int32_t>::max(),
          "attention on CUDA: ", std::max(q_rows, kv_rows), " rows; at most 2^31 - 1 are supported");
  Batch b;
  int64_t q_done = 0, kv_done = 0;
  for (const LocalTask& t : sorted) {
    b.q_ends.push_back(static_cast<int32_t>(q_done));
    b.kv_begins.push_back(static_cast<int32_t>(t.kv_begin));
    b.kv_lengths.push_back(static_cast<int32_t>(t.kv_rows()));
    b.own_keys = b.own_keys && t.kv_begin == kv_done;
    b.max_q = std::max(b.max_q, t.q_rows());
    b.max_kv = std::max(b.max_kv, t.kv_rows());
    q_done += t.q_rows();
    kv_done = t.kv_end;
  }
  b.own_keys = b.own_keys && kv_done == kv_rows;
  b.q_ends.push_back(static_cast<int32_t>(q_done));
  b.kv_begins.push_back(static_cast<int32_t>(kv_done));
  if (q_done < q_rows)
    for (const LocalTask& t : sorted)
      for (int64_t row = t.q_begin; row < t.q_end; ++row) b.q_index.push_back(row);
  // With a single query row for each task ATen would take another path, which splits keys over thread blocks.
  b.max_q = std::max<int64_t>(b.max_q, 2);
  return b;
}

/// A mask in the terms of ATen's arguments.
struct Window {
  bool causal;
  std::optional<int64_t> left, right;
};
Window window_of(const FlashOptions& options) {
  const Mask& mask = options.mask;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // ATen counts in 32 bits
  if (options.keys_before) return {false, std::min(*options.keys_before, kMost), options.keys_after};
  if (mask.window == 0) return {!mask.is_full(), std::nullopt, std::nullopt};
  return {!mask.is_full(), mask.window - 1, mask.is_full() ? mask.window - 1 : 0};
}

std::vector<int64_t> rows_of_keys(const Batch& b) {
  std::vector<int64_t> index;
  for (size_t i = 0; i < b.kv_lengths.size(); ++i)
    for (int64_t row = b.kv_begins[i]; row < b.kv_begins[i] + b.kv_lengths[i]; ++row) index.push_back(row);
  return index;
}

/// Adds up the partial gradients of each task's keys, in the order of the tasks.
Tensor sum_of_tasks(const Tensor& partial, const Tensor& like, const Batch& b) {
  const int64_t sizes[] = {like.size(0), like.size(1), like.size(2)};
  Tensor sum = torch::stable::new_zeros(like, sizes, ScalarType::Float);
  int64_t done = 0;
  for (size_t i = 0; i < b.kv_lengths.size(); ++i) {
    const Tensor rows = aten::narrow_rows(sum, b.kv_begins[i], b.kv_lengths[i]);
    aten::assign(rows, aten::add(rows, aten::narrow_rows(partial, done, b.kv_lengths[i])));
    done += b.kv_lengths[i];
  }
  return sum;
}

/// Queries and a positive scale. Flash attention takes the largest score of a row before it scales scores, and sets
/// those that are not seen to -inf; with a scale that is not positive they would become inf or NaN.
struct Scaled {
  Tensor q;
  double scale;
};

Scaled with_positive_scale(const Tensor& q, float scale) {
  if (scale > 0.f) return {q, scale};
  if (scale < 0.f) return {aten::unary("aten::neg", q), -scale};
  Tensor none = empty_rows(q, q.size(0), q.size(1), q.size(2));
  return {torch::stable::zero_(none), 1.0};
}

/// The gradient of q, from that of what with_positive_scale made of it.
Tensor gradient_of_scaled(Tensor dq, float scale) {
  if (scale > 0.f) return dq;
  return scale < 0.f ? aten::unary("aten::neg", dq) : torch::stable::zero_(dq);
}

}  // namespace

Tensor aligned_rows(const Tensor& t) {
  if (t.dim() != 3) return t;  // rows_of refuses it later
  const auto bytes = static_cast<int64_t>(t.element_size());
  // The copy engine takes no stride of zero, which an expanded tensor has.
  const auto is_fine = [&](int64_t dim) {
    return t.stride(dim) * bytes % 16 == 0 && (t.stride(dim) != 0 || t.size(dim) <= 1);
  };
  const bool fine = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && is_fine(0) && is_fine(1) && t.stride(2) == 1;
  if (fine) return t;
  Tensor copy = empty_rows(t, t.size(0), t.size(1), t.size(2));
  torch::stable::copy_(copy, t);
  return copy;
}

void check_flash(const Tensor& q, const HeadShape& heads, float softcap) {
  require(heads.dtype != DType::kFloat32,
          "attention on CUDA: the tensors are float32; bfloat16 and float16 are supported, and float32 on the CPU");
  require(heads.dim == heads.v_dim, "attention on CUDA: q and k have head dim ", heads.dim, ", v has ", heads.v_dim,
          "; equal ones are supported by ATen's flash attention, others by distca's own kernels");
  require(heads.dim <= 256, "attention on CUDA: head dim ", heads.dim,
          "; ATen's flash attention has up to 256, distca's own kernels have up to ", kMostHeadDim);
  require(softcap == 0.f, "attention on CUDA: softcap = ", softcap,
          "; ATen's flash attention has none, distca's own kernels do");
  if (!q.is_cuda()) return;
  const int capability = gpu_capability(q.get_device_index());
  require<DeviceError>(capability >= 80, "attention on CUDA: device ", q.get_device_index(), " has compute capability ",
                       capability / 10, ".", capability % 10, "; 8.0 and later are supported");
}

std::tuple<Tensor, Tensor> flash_forward(const Tensor& q_any, const Tensor& k_any, const Tensor& v_any,
                                         std::span<const LocalTask> tasks, const FlashOptions& options) {
  Tensor out = empty_rows(q_any, q_any.size(0), q_any.size(1), v_any.size(2));
  Tensor lse = empty_scalars(q_any, q_any.size(0), q_any.size(1));
  const Batch b = make_batch(tasks, q_any.size(0), k_any.size(0));
  const bool scattered = !b.q_index.empty();
  if (tasks.empty() || scattered) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  if (tasks.empty()) return {out, lse};
  const Tensor k = aligned_rows(k_any), v = aligned_rows(v_any);
  Tensor index;
  if (scattered) index = aten::vector_on_device_of<int64_t>(q_any, b.q_index);
  const auto [q, scale] =
      with_positive_scale(scattered ? aten::select_rows(q_any, index) : aligned_rows(q_any), options.scale);
  const Tensor q_ends = aten::vector_on_device_of<int32_t>(q, b.q_ends);
  const Tensor kv_begins = aten::vector_on_device_of<int32_t>(q, b.kv_begins);
  std::optional<Tensor> kv_lengths;
  if (!b.own_keys) kv_lengths = aten::vector_on_device_of<int32_t>(q, b.kv_lengths);
  const Window window = window_of(options);
  const aten::Stack results = aten::call("aten::_flash_attention_forward", "", q, k, v, std::optional(q_ends),
                                         std::optional(kv_begins), b.max_q, b.max_kv, 0.0, window.causal, false,
                                         std::optional<double>(scale), window.left, window.right, kv_lengths);
  const Tensor computed = aten::tensor(results[0]);
  const Tensor computed_lse = torch::stable::transpose(aten::tensor(results[1]), 0, 1);  // [H, T] there
  for (size_t i = 2; i < 5; ++i) aten::tensor(results[i]);
  if (scattered) {
    aten::scatter_rows(out, index, computed);
    aten::scatter_rows(lse, index, computed_lse);
  } else {
    aten::assign(lse, computed_lse);
    out = torch::stable::contiguous(computed);
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& dout_any, const Tensor& q_any, const Tensor& k_any,
                                                  const Tensor& v_any, const Tensor& out_any, const Tensor& lse_any,
                                                  std::span<const LocalTask> tasks, const FlashOptions& options) {
  const Batch b = make_batch(tasks, q_any.size(0), k_any.size(0));
  const bool scattered = !b.q_index.empty();
  Tensor dq = empty_rows(q_any, q_any.size(0), q_any.size(1), q_any.size(2));
  if (tasks.empty() || scattered) torch::stable::zero_(dq);
  if (tasks.empty()) {
    Tensor dk = empty_rows(k_any, k_any.size(0), k_any.size(1), k_any.size(2));
    Tensor dv = empty_rows(v_any, v_any.size(0), v_any.size(1), v_any.size(2));
    return {dq, torch::stable::zero_(dk), torch::stable::zero_(dv)};
  }
  Tensor index, kv_index;
  if (scattered) index = aten::vector_on_device_of<int64_t>(q_any, b.q_index);
  if (!b.own_keys) kv_index = aten::vector_on_device_of<int64_t>(q_any, rows_of_keys(b));
  const auto of_queries = [&](const Tensor& t) { return scattered ? aten::select_rows(t, index) : t; };
  const auto of_keys = [&](const Tensor& t) { return b.own_keys ? aligned_rows(t) : aten::select_rows(t, kv_index); };
  const auto [q, scale] = with_positive_scale(aligned_rows(of_queries(q_any)), options.scale);
  const Tensor k = of_keys(k_any), v = of_keys(v_any);
  const Tensor lse = torch::stable::contiguous(torch::stable::transpose(of_queries(lse_any), 0, 1));
  std::vector<int32_t> kv_ends{0};
  for (const int32_t length : b.kv_lengths) kv_ends.push_back(kv_ends.back() + length);
  const int64_t of_dropout[] = {2};  // there is no dropout
  const Tensor unused = torch::stable::new_empty(q, of_dropout, ScalarType::UInt64);
  const Window window = window_of(options);
  const aten::Stack results =
      aten::call("aten::_flash_attention_backward", "", torch::stable::contiguous(of_queries(dout_any)), q, k, v,
                 torch::stable::contiguous(of_queries(out_any)), lse, aten::vector_on_device_of<int32_t>(q, b.q_ends),
                 aten::vector_on_device_of<int32_t>(q, kv_ends), b.max_q, b.max_kv, 0.0, window.causal, unused, unused,
                 std::optional<double>(scale), window.left, window.right);
  const Tensor dq_rows = gradient_of_scaled(aten::tensor(results[0]), options.scale);
  const Tensor dk = aten::tensor(results[1]), dv = aten::tensor(results[2]);
  if (scattered)
    aten::scatter_rows(dq, index, dq_rows);
  else
    dq = torch::stable::contiguous(dq_rows);
  if (b.own_keys) return {dq, torch::stable::contiguous(dk), torch::stable::contiguous(dv)};
  return {dq, sum_of_tasks(dk, k_any, b), sum_of_tasks(dv, v_any, b)};
}

std::optional<Tensor> taken_gradient_of_lse(bool backend_takes_it, const std::optional<Tensor>& dlse) {
  if (backend_takes_it || !dlse.has_value()) return dlse;
  const Tensor any = aten::unary("aten::any", *dlse);
  const Tensor host = torch::stable::to(any, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  require(!*static_cast<const bool*>(host.data_ptr()), kNoGradientOfLse);
  return std::nullopt;
}

void add_sinks(const Tensor& out, const Tensor& lse, const Tensor& sinks) {
  const Tensor share = aten::unary("aten::sigmoid", torch::stable::subtract(lse, sinks));
  aten::assign(out, aten::multiply(aten::cast(out, ScalarType::Float), torch::stable::unsqueeze(share, 2)));
  const Tensor sum = aten::binary("aten::logaddexp", "", lse, sinks), empty = aten::unary("aten::isneginf", lse);
  aten::assign(lse, aten::tensor(aten::call("aten::where", "self", empty, lse, sum)[0]));
}

}  // namespace distca::ops
