// Errors of the CUDA runtime as errors of the library.
#pragma once

#include <cuda_runtime_api.h>

#include "common/error.h"

namespace distca::cuda {

/// Throws DeviceError unless `result` is success; `what` says what was tried.
inline void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) [[unlikely]]
    throw DeviceError(message(what, ": ", cudaGetErrorString(result), " (", cudaGetErrorName(result), ")"));
}

}  // namespace distca::cuda
