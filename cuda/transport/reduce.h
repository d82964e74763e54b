// Adds partial key gradients that came home; see runtime/reduce_table.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "runtime/device_table.h"
#include "runtime/reduce_table.h"

namespace distca::cuda {

/// A ReduceTable's number of chunks, its entries and its terms are the parts. Returned tensors are of `dtype`, rounded
/// to nearest even.
void reduce_rows(const DeviceTable& table, DType dtype, cudaStream_t stream);
void load_reduce_kernels();

}  // namespace distca::cuda
