// The kernels of one head shape for compute capability 9.0, as __global__ functions and their launches.
#pragma once

#include "attention/hopper_backward.h"
#include "attention/hopper_forward.h"
#include "attention/launch.h"

namespace distca::attention::cuda {

template <class Config>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ KernelParams params) {
  forward_cta<Config>(params, shared_memory<typename Config::Shared>());
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  backward_cta<Config>(params, shared_memory<typename Config::Shared>());
}

template <class Config>
__global__ void store_queries_kernel(const __grid_constant__ KernelParams params) {
  const auto index = static_cast<int>(blockIdx.x);
  if (index >= params.num_store_items()) return;
  store_queries<Config>(params, params.store_items[index], static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

template <class Element, int kDim, int kValueDim>
HeadKernels head_kernels(DType dtype) {
  using Forward = ForwardConfig<Element, kDim, kValueDim>;
  using Backward = BackwardConfig<Element, kDim, kValueDim>;
  constexpr int kMost = 227 * 1024;  // of shared memory that a CTA of compute capability 9.0 can have
  static_assert(sizeof(typename Forward::Shared) + alignof(typename Forward::Shared) <= kMost);
  static_assert(sizeof(typename Backward::Shared) + alignof(typename Backward::Shared) <= kMost);
  return {dtype,
          kDim,
          kValueDim,
          {Forward::kRows, Forward::kKeys},
          launch<Forward, kThreads, forward_kernel<Forward>>,
          {Backward::kRows, Backward::kKeys},
          Backward::kParts * Backward::kPartElements,
          Backward::kTurnsPerTile,
          Backward::kPasses,
          launch<Backward, kThreads, backward_kernel<Backward>>,
          launch_store_queries<store_queries_kernel<Backward>>,
          [] { return load(forward_kernel<Forward>, backward_kernel<Backward>, store_queries_kernel<Backward>); }};
}

/// The kernels of both dtypes.
template <int kDim, int kValueDim>
std::span<const HeadKernels> hopper_kernels() {
  static const HeadKernels kernels[] = {head_kernels<gpu::BFloat16, kDim, kValueDim>(DType::kBFloat16),
                                        head_kernels<gpu::Float16, kDim, kValueDim>(DType::kFloat16)};
  return kernels;
}

}  // namespace distca::attention::cuda
