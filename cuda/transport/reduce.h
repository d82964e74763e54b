// Adds partial key gradients that came home; see reduce_table.h.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"
#include "transport/guard.h"
#include "transport/reduce_table.h"

namespace distca::cuda {

using transport::Guard;

/// A ReduceTable in device memory.
struct DeviceReduceTable {
  const ReduceEntry* entries;
  const float* const* terms;
  int32_t num_entries, num_chunks;
};

/// Returned tensors are of `dtype`, rounded to nearest even. Writes NaN where the context has stopped.
void reduce_rows(const DeviceReduceTable& table, DType dtype, const Guard& guard, cudaStream_t stream);

}  // namespace distca::cuda
