// What a GPU does with rows besides attention: the same operations as the CPU's, on device memory, in the order of a
// stream.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "common/rows.h"

namespace distca::cuda {

/// to = from; views may lie on two devices that can address each other.
void copy_rows(const RowView& to, const RowView& from, const RowExtent& n, cudaStream_t stream);
/// Every 4 bytes of the rows become `word`; head_bytes is a multiple of 4.
void fill_rows(const RowView& rows, const RowExtent& n, uint32_t word, cudaStream_t stream);
/// delta[i, h] = sum over dim of out[i, h, :] * dout[i, h, :], in fp32.
void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
             cudaStream_t stream);

}  // namespace distca::cuda
