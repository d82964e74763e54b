// The inner loops of the CPU kernel: a table of functions for one instruction set.
//
// micro_kernel.cpp is compiled once for each instruction set, each time with its own compiler flags, and yields one
// table. All matrices are fp32, row-major and packed in scratch memory; only load_rows, store_rows see strides and
// dtypes of the caller. Every element of a product is summed over the inner dimension in one order (ascending chains of
// 64 products, each from zero), so that a row comes out bitwise the same however many rows are computed beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/dtype.h"

namespace distca::attention {

/// Widths of packed matrices are multiples of this many floats, and so are the columns of a product.
inline constexpr int64_t kPackedColumns = 16;

/// Row length of a packed matrix that has one column for each key of a block.
inline constexpr int64_t kScoreColumns = 64;

/// Left factor of a product: element (i, p) is data[i * row_stride + p * column_stride].
struct LeftFactor {
  const float* data;
  int64_t row_stride;
  int64_t column_stride;
};

/// Row i of a tile sees keys [max(0, from + i), min(limit, upto + i)) of the block, none where that is empty.
struct VisibleKeys {
  int64_t from;
  int64_t upto;
  int64_t limit;
};

struct MicroKernel {
  const char* isa;

  /// c[m, n] += a[m, k] * b[k, n]; n a multiple of kPackedColumns.
  void (*multiply_add)(int64_t m, int64_t n, int64_t k, LeftFactor a, const float* b, int64_t b_stride, float* c,
                       int64_t c_stride);

  /// Converts `rows` rows of `dim` elements (byte stride src_stride) to fp32; columns dim..dst_stride become zero.
  void (*load_rows)(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, float* dst,
                    int64_t dst_stride);

  /// Writes factor * src, rounded once to `dtype`; the inverse of load_rows.
  void (*store_rows)(DType dtype, int64_t rows, int64_t dim, float factor, const float* src, int64_t src_stride,
                     std::byte* dst, int64_t dst_stride);

  /// dst[j, i] = src[i, j]; rows and columns are multiples of 4.
  void (*transpose)(int64_t rows, int64_t columns, const float* src, int64_t src_stride, float* dst,
                    int64_t dst_stride);

  /// One step of the online softmax. scores [rows, kScoreColumns] become exp(scale * score - new maximum), zero where a
  /// row sees no key; row maxima, row sums and the running output [rows, out_columns] are updated. A row whose
  /// maximum is still -inf keeps a sum and an output of zero.
  void (*softmax_step)(int64_t rows, VisibleKeys visible, float scale, float* scores, float* row_max, float* row_sum,
                       float* out, int64_t out_columns);

  /// out[i, :] /= row_sum[i]; zero where the sum is zero.
  void (*divide_rows)(int64_t rows, int64_t columns, const float* row_sum, float* out);

  /// scores become P = exp(scale * score - lse), dprobs become dS = P * (dprobs - delta); both [rows, kScoreColumns],
  /// zero where a row sees no key and in rows whose lse is -inf. prob_sum[i], if not null, grows by the sum of P's row
  /// i.
  void (*softmax_gradient)(int64_t rows, VisibleKeys visible, float scale, const float* lse, const float* delta,
                           float* scores, float* dprobs, float* prob_sum);
};

/// The table for `isa` ("avx512", "avx2", "plain"); if empty, for the one in the environment variable DISTCA_CPU_ISA;
/// if that is unset or empty, the best that this CPU has. InvalidArgumentError for a name that is unknown or that this
/// CPU lacks.
const MicroKernel& select_micro_kernel(std::string_view isa);

}  // namespace distca::attention
