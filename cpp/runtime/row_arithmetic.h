// What the dispatcher does with the elements of rows: sums and casts of gradients, fills.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "common/rows.h"

namespace distca::runtime {

inline float* float_at(const RowView& view, int64_t row, int64_t head) {
  return reinterpret_cast<float*>(view.at(row, head));
}

/// sum (+)= partial, over [rows, heads, dim] fp32.
inline void accumulate(const RowView& sum, const RowView& partial, const RowExtent& n, bool assign) {
  if (assign) {
    copy_rows(sum, partial, n);
    return;
  }
  const int64_t dim = n.head_bytes / 4;
  for (int64_t i = 0; i < n.num_rows; ++i) {
    for (int64_t h = 0; h < n.num_heads; ++h) {
      float* to = float_at(sum, i, h);
      const float* from = float_at(partial, i, h);
      for (int64_t d = 0; d < dim; ++d) to[d] += from[d];
    }
  }
}

inline void cast_rows(const RowView& to, DType dtype, const RowView& from, const RowExtent& n) {
  if (dtype == DType::kFloat32) {
    copy_rows(to, from, n);
    return;
  }
  const int64_t dim = n.head_bytes / 4;
  for (int64_t i = 0; i < n.num_rows; ++i) {
    for (int64_t h = 0; h < n.num_heads; ++h) {
      auto* out = reinterpret_cast<uint16_t*>(to.at(i, h));
      const float* in = float_at(from, i, h);
      for (int64_t d = 0; d < dim; ++d)
        out[d] = dtype == DType::kBFloat16 ? float_to_bf16(in[d]) : float_to_fp16(in[d]);
    }
  }
}

inline void fill_bytes(const RowView& view, const RowExtent& n, int byte) {
  for (int64_t i = 0; i < n.num_rows; ++i)
    for (int64_t h = 0; h < n.num_heads; ++h) std::memset(view.at(i, h), byte, static_cast<size_t>(n.head_bytes));
}

}  // namespace distca::runtime
