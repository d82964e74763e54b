// Adds up partial key gradients that came home (see runtime/reduce_table.h).
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "runtime/device_table.h"
#include "runtime/reduce_table.h"

namespace distca::cuda {

/// Carries out a ReduceTable. The table's parts are its number of chunks, its entries and its terms. Returned tensors
/// are of `dtype`, the dtype of the heads, rounded to nearest even.
void reduce_rows(const DeviceTable& table, DType dtype, cudaStream_t stream);
void load_reduce_kernels();

}  // namespace distca::cuda
