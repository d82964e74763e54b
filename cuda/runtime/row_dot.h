// Row sums of products on a GPU, like attention::row_dot.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/rows.h"

namespace distca::cuda {

/// Sets delta[i, h] = sum over dim of out[i, h, :] * dout[i, h, :], in fp32.
void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
             cudaStream_t stream);
void load_row_dot_kernels();

}  // namespace distca::cuda
