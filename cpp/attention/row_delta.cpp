// delta = rowsum(out * dout) - dlse, and the gradient of sinks that follows from it. Both are the same on every
// instruction set: eight sums side by side, then a tree.
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
  DeltaRows rows;
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

float value_at(const RowView& scalars, int64_t row, int64_t head) {
  float value;
  std::memcpy(&value, scalars.at(row, head), sizeof(value));
  return value;
}

float delta_at(Dot dot_of, int64_t dim, const DeltaRows& rows, int64_t row, int64_t head) {
  const float sum = dot_of(dim, rows.out.at(row, head), rows.dout.at(row, head));
  return rows.dlse.data == nullptr ? sum : sum - value_at(rows.dlse, row, head);
}

void work(const Call& call, int worker) {
  const int64_t begin = call.num_rows * worker / call.num_workers;
  const int64_t end = call.num_rows * (worker + 1) / call.num_workers;
  const Dot dot_of = dot_for(call.dtype);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t h = 0; h < call.q_heads; ++h) {
      const float delta = delta_at(dot_of, call.v_dim, call.rows, i, h);
      std::memcpy(call.rows.delta.at(i, h), &delta, sizeof(delta));
    }
  }
}

}  // namespace

void row_delta(const HeadShape& heads, int64_t num_rows, const DeltaRows& rows, const Parallel& parallel) {
  require(heads.v_dim % kLanes == 0, "row_delta: v_dim is ", heads.v_dim, "; allowed are multiples of ", kLanes);
  require(num_rows >= 0, "row_delta: num_rows is ", num_rows, "; it must not be negative");
  if (num_rows == 0) return;
  const int num_workers = static_cast<int>(std::clamp<int64_t>(parallel.num_workers, 1, num_rows));
  const Call call{heads.q_heads, heads.v_dim, heads.dtype, num_rows, num_workers, rows};
  parallel.run(num_workers, [&call](int worker) { work(call, worker); });  // one pointer fits into std::function
}

void sink_gradient(const HeadShape& heads, int64_t num_rows, const DeltaRows& rows, const RowView& lse,
                   const float* sinks, float* dsinks, const Parallel& parallel) {
  require(heads.v_dim % kLanes == 0, "sink_gradient: v_dim is ", heads.v_dim, "; allowed are multiples of ", kLanes);
  const Dot dot_of = dot_for(heads.dtype);
  const int num_workers = static_cast<int>(std::clamp<int64_t>(parallel.num_workers, 1, heads.q_heads));
  const auto work_on_heads = [&](int worker) {
    for (int64_t h = heads.q_heads * worker / num_workers; h < heads.q_heads * (worker + 1) / num_workers; ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < num_rows; ++i) {
        const float row_lse = value_at(lse, i, h);
        if (row_lse == -std::numeric_limits<float>::infinity()) continue;
        sum -= std::exp(static_cast<double>(sinks[h]) - row_lse) * delta_at(dot_of, heads.v_dim, rows, i, h);
      }
      dsinks[h] = static_cast<float>(sum);
    }
  };
  parallel.run(num_workers, [&work_on_heads](int worker) { work_on_heads(worker); });
}

}  // namespace distca::attention
