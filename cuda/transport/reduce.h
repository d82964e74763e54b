// Adds partial key gradients that came home; see runtime/reduce_table.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "runtime/reduce_table.h"

namespace distca::cuda {

/// A ReduceTable in device memory.
struct DeviceReduceTable {
  const runtime::ReduceEntry* entries;
  const float* const* terms;
  int32_t num_entries, num_chunks;
};

/// Returned tensors are of `dtype`, rounded to nearest even.
void reduce_rows(const DeviceReduceTable& table, DType dtype, cudaStream_t stream);

}  // namespace distca::cuda
