// Turns errors of the CUDA runtime into errors of the library.
#pragma once

#include <cuda_runtime_api.h>

#include "common/error.h"

namespace distca::cuda {

/// Forgets the thread's last error. Otherwise the check after the next launch would find it.
inline void forget_error() { static_cast<void>(cudaGetLastError()); }

/// Throws DeviceError unless `result` is success; `what` says what was tried.
inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) [[likely]]
    return;
  forget_error();
  const char* const advice = result == cudaErrorNoKernelImageForDevice
                                 ? "; build distca with a TORCH_CUDA_ARCH_LIST that has this GPU's compute capability"
                                 : "";
  throw DeviceError(message(what, ": ", cudaGetErrorString(result), " (", cudaGetErrorName(result), ")", advice));
}

/// Loads a kernel. Otherwise its first launch would load it, which may wait for the whole device, and therefore for
/// kernels that wait for what this thread has yet to queue.
template <class Kernel>
void load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading a kernel");
}

}  // namespace distca::cuda
