// delta = rowsum(out * dout), and the gradient of sinks that follows from it. Both are the same on every instruction
// set: eight sums side by side, then a tree.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "common/error.h"

namespace distca::attention {

namespace {

constexpr int64_t kLanes = 8;

struct Call {
  int64_t q_heads;
  int64_t v_dim;
  DType dtype;
  int64_t num_rows;
  int num_workers;
  RowView out, dout, delta;
};

inline float widen_fp32(float x) { return x; }

template <class Element, float (*kWiden)(Element)>
float dot(int64_t dim, const std::byte* a_bytes, const std::byte* b_bytes) {
  const Element* a = reinterpret_cast<const Element*>(a_bytes);
  const Element* b = reinterpret_cast<const Element*>(b_bytes);
  float sum[kLanes] = {};
  for (int64_t i = 0; i < dim; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) sum[j] += kWiden(a[i + j]) * kWiden(b[i + j]);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t j = 0; j < width; ++j) sum[j] += sum[j + width];
  return sum[0];
}

using Dot = float (*)(int64_t, const std::byte*, const std::byte*);
Dot dot_for(DType dtype) {
  return dtype == DType::kFloat32    ? dot<float, widen_fp32>
         : dtype == DType::kBFloat16 ? dot<uint16_t, bf16_to_float>
                                     : dot<uint16_t, fp16_to_float>;
}

void work(const Call& call, int worker) {
  const int64_t begin = call.num_rows * worker / call.num_workers;
  const int64_t end = call.num_rows * (worker + 1) / call.num_workers;
  const Dot dot_of = dot_for(call.dtype);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t h = 0; h < call.q_heads; ++h) {
      const float delta = dot_of(call.v_dim, call.out.at(i, h), call.dout.at(i, h));
      std::memcpy(call.delta.at(i, h), &delta, sizeof(delta));
    }
  }
}

}  // namespace

void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
             const Parallel& parallel) {
  require(heads.v_dim % kLanes == 0, "row_dot: v_dim is ", heads.v_dim, "; allowed are multiples of ", kLanes);
  require(num_rows >= 0, "row_dot: num_rows is ", num_rows, "; it must not be negative");
  if (num_rows == 0) return;
  const int num_workers = static_cast<int>(std::clamp<int64_t>(parallel.num_workers, 1, num_rows));
  const Call call{heads.q_heads, heads.v_dim, heads.dtype, num_rows, num_workers, out, dout, delta};
  parallel.run(num_workers, [&call](int worker) { work(call, worker); });  // one pointer fits into std::function
}

void sink_gradient(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout,
                   const RowView& lse, const float* sinks, float* dsinks, const Parallel& parallel) {
  require(heads.v_dim % kLanes == 0, "sink_gradient: v_dim is ", heads.v_dim, "; allowed are multiples of ", kLanes);
  const Dot dot_of = dot_for(heads.dtype);
  const int num_workers = static_cast<int>(std::clamp<int64_t>(parallel.num_workers, 1, heads.q_heads));
  const auto work_on_heads = [&](int worker) {
    for (int64_t h = heads.q_heads * worker / num_workers; h < heads.q_heads * (worker + 1) / num_workers; ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < num_rows; ++i) {
        float row_lse;
        std::memcpy(&row_lse, lse.at(i, h), sizeof(row_lse));
        if (row_lse == -std::numeric_limits<float>::infinity()) continue;
        sum -= std::exp(static_cast<double>(sinks[h]) - row_lse) * dot_of(heads.v_dim, out.at(i, h), dout.at(i, h));
      }
      dsinks[h] = static_cast<float>(sum);
    }
  };
  parallel.run(num_workers, [&work_on_heads](int worker) { work_on_heads(worker); });
}

}  // namespace distca::attention
