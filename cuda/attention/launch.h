// How kernels are started, whatever they are compiled for. Include it where they are defined.
#pragma once

#include <algorithm>

#include "attention/gpu.h"
#include "attention/kernels.h"

namespace distca::attention::cuda {

/// Shared memory of a CTA. What starts a kernel gives it as much more as aligning it may take.
template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ std::byte memory[];
  constexpr int kAlignment = alignof(Shared);
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<Shared*>(memory + (kAlignment - at % kAlignment) % kAlignment);
}

/// Starts a kernel whose CTAs stay: as many as fit, and no more than there are items.
template <class Config, int kThreads, void (*kKernel)(KernelParams)>
cudaError_t launch(const KernelParams& params, int num_items, int num_sms, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Config::Shared) + alignof(typename Config::Shared);
  cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  int ctas_of_sm = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_of_sm, kKernel, kThreads, kBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<std::min(num_items, num_sms * ctas_of_sm), kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

template <void (*kStoreQueries)(KernelParams)>
cudaError_t launch_store_queries(const KernelParams& params, int num_items, int, cudaStream_t stream) {
  kStoreQueries<<<num_items, 256, 0, stream>>>(params);
  return cudaGetLastError();
}

template <class... Kernels>
cudaError_t load(Kernels*... kernels) {
  cudaError_t error = cudaSuccess;
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...})
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  return error;
}

}  // namespace distca::attention::cuda
