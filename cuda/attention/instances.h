// The kernels of one head shape, as __global__ functions and their launches.
#pragma once

#include "attention/backward_kernel.h"
#include "attention/forward_kernel.h"
#include "attention/kernels.h"

namespace distca::attention::cuda {

/// The alignment that operands' tiles want. Dynamic shared memory is not guaranteed to have it.
inline constexpr int kSharedAlignment = 1024;

template <class Config>
__device__ __forceinline__ typename Config::Shared& shared_memory() {
  extern __shared__ std::byte memory[];
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<typename Config::Shared*>(memory +
                                                     (kSharedAlignment - at % kSharedAlignment) % kSharedAlignment);
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ KernelParams params) {
  forward_cta<Config>(params, shared_memory<Config>());
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  backward_cta<Config>(params, shared_memory<Config>());
}

template <class Config>
__global__ void store_queries_kernel(const __grid_constant__ KernelParams params) {
  const auto index = static_cast<int>(blockIdx.x);
  if (index >= params.num_store_items()) return;
  store_queries<Config>(params, params.store_items[index], static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

/// Launches a kernel whose CTAs stay and take all of a multiprocessor's shared memory.
template <class Config, void (*kKernel)(KernelParams)>
cudaError_t launch(const KernelParams& params, int num_ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Config::Shared) + kSharedAlignment;
  static_assert(kBytes <= 227 * 1024, "more than a CTA of compute capability 9.0 can have");
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<num_ctas, kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

template <class Config>
cudaError_t launch_store_queries(const KernelParams& params, int num_ctas, cudaStream_t stream) {
  store_queries_kernel<Config><<<num_ctas, 256, 0, stream>>>(params);
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

template <class Element, int kDim, int kValueDim>
HeadKernels head_kernels(DType dtype) {
  using Forward = ForwardConfig<Element, kDim, kValueDim>;
  using Backward = BackwardConfig<Element, kDim, kValueDim>;
  return {dtype,
          kDim,
          kValueDim,
          {Forward::kRows, Forward::kKeys},
          launch<Forward, forward_kernel<Forward>>,
          {Backward::kRows, Backward::kKeys},
          Backward::kParts * Backward::kPartElements,
          Backward::kTurnsPerTile,
          Backward::kPasses,
          launch<Backward, backward_kernel<Backward>>,
          launch_store_queries<Backward>,
          [] { return load(forward_kernel<Forward>, backward_kernel<Backward>, store_queries_kernel<Backward>); }};
}

/// The kernels of both dtypes.
template <int kDim, int kValueDim>
std::span<const HeadKernels> head_kernels() {
  static const HeadKernels kernels[] = {head_kernels<hopper::BFloat16, kDim, kValueDim>(DType::kBFloat16),
                                        head_kernels<hopper::Float16, kDim, kValueDim>(DType::kFloat16)};
  return kernels;
}

}  // namespace distca::attention::cuda
