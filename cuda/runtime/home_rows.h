// What a home computes over its own rows on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/attention.h"
#include "runtime/device_table.h"

namespace distca::cuda {

/// Does what attention::row_delta does.
void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, cudaStream_t stream);
/// Does what attention::add_sinks does. The sinks lie on the device.
void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
               cudaStream_t stream);
/// Does what Backend::largest does. The terms are a part of the table.
void largest(const DeviceTable& table, size_t part, int64_t n, float* to, cudaStream_t stream);
void load_home_row_kernels();

}  // namespace distca::cuda
