// Arithmetic on the elements of rows, on the host: sums and casts of gradients, fills.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "common/rows.h"
#include "runtime/reduce_table.h"

namespace distca::runtime {

inline float* float_at(const RowView& view, int64_t row, int64_t head) {
  return reinterpret_cast<float*>(view.at(row, head));
}

/// Casts fp32 values to another dtype.
inline void cast_values(std::byte* to, DType dtype, const float* from, int64_t n) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  auto* const out = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < n; ++i) out[i] = dtype == DType::kBFloat16 ? float_to_bf16(from[i]) : float_to_fp16(from[i]);
}

/// Casts values of two bytes to fp32.
inline void widen_values(float* to, DType dtype, const std::byte* from, int64_t n) {
  const auto* const in = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = dtype == DType::kBFloat16 ? bf16_to_float(in[i]) : fp16_to_float(in[i]);
}

/// Does on the host what the GPU's kernel does with the sums of a round.
inline void reduce_on_host(const ReduceTable& table, DType dtype) {
  constexpr int64_t kAtOnce = 512;  // values of a head, which stay in the first cache
  for (const ReduceEntry& e : table.entries) {
    float sum[kAtOnce], widened[kAtOnce];
    for (int64_t i = 0, n = 0; i < e.num_values; i += n) {
      n = std::min(kAtOnce, e.dim - i % e.dim);
      const auto values_of_term = [&](int32_t t) {
        const std::byte* const term = table.terms[static_cast<size_t>(t)];
        if (!e.narrow) return reinterpret_cast<const float*>(term) + i;
        widen_values(widened, dtype, term + 2 * i, n);
        return static_cast<const float*>(widened);
      };
      int32_t t = e.first_term;
      const auto bytes = static_cast<size_t>(n) * sizeof(float);
      std::memcpy(sum, e.starts ? values_of_term(t++) : e.sum + i, bytes);
      for (; t < e.first_term + e.num_terms; ++t) {
        const float* const term = values_of_term(t);
        for (int64_t d = 0; d < n; ++d) sum[d] += term[d];
      }
      if (e.finishes)
        cast_values(place_of_value(e, i, static_cast<int32_t>(dtype_bytes(dtype))), dtype, sum, n);
      else
        std::memcpy(e.sum + i, sum, bytes);
    }
  }
}

inline void fill_bytes(const RowView& view, const RowExtent& n, int byte) {
  for (int64_t i = 0; i < n.num_rows; ++i)
    for (int64_t h = 0; h < n.num_heads; ++h) std::memset(view.at(i, h), byte, static_cast<size_t>(n.head_bytes));
}

}  // namespace distca::runtime
