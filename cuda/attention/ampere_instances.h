// The kernels of one head shape for compute capability 8.0 and later, as __global__ functions and their launches.
#pragma once

#include "attention/ampere_backward.h"
#include "attention/ampere_forward.h"
#include "attention/launch.h"

namespace distca::attention::cuda {

/// CTAs of a multiprocessor for which the kernels' registers are enough.
template <class Config>
inline constexpr int kResidentCtas = maximum(256 / Config::kThreads, 1);

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kResidentCtas<Config>)
    ampere_forward_kernel(const __grid_constant__ KernelParams params) {
  ampere_forward_cta<Config>(params, shared_memory<typename Config::Shared>());
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kResidentCtas<Config>)
    ampere_backward_kernel(const __grid_constant__ KernelParams params) {
  ampere_backward_cta<Config>(params, shared_memory<typename Config::Shared>());
}

template <class Config>
__global__ void ampere_store_queries_kernel(const __grid_constant__ KernelParams params) {
  const auto index = static_cast<int>(blockIdx.x);
  if (index >= params.num_store_items()) return;
  ampere_store_queries<Config>(params, params.store_items[index], static_cast<int>(threadIdx.x),
                               static_cast<int>(blockDim.x));
}

template <class Element, int kDim, int kValueDim>
HeadKernels ampere_head_kernels(DType dtype) {
  using Forward = AmpereForwardConfig<Element, kDim, kValueDim>;
  using Backward = AmpereBackwardConfig<Element, kDim, kValueDim>;
  return {dtype,
          kDim,
          kValueDim,
          {Forward::kRows, Forward::kKeys},
          launch<Forward, Forward::kThreads, ampere_forward_kernel<Forward>>,
          {Backward::kRows, Backward::kKeys},
          Backward::kParts * Backward::kPartElements,
          Backward::kTurnsPerTile,
          Backward::kPasses,
          launch<Backward, Backward::kThreads, ampere_backward_kernel<Backward>>,
          launch_store_queries<ampere_store_queries_kernel<Backward>>,
          [] {
            return load(ampere_forward_kernel<Forward>, ampere_backward_kernel<Backward>,
                        ampere_store_queries_kernel<Backward>);
          }};
}

/// The kernels of both dtypes.
template <int kDim, int kValueDim>
std::span<const HeadKernels> ampere_kernels() {
  static const HeadKernels kernels[] = {ampere_head_kernels<gpu::BFloat16, kDim, kValueDim>(DType::kBFloat16),
                                        ampere_head_kernels<gpu::Float16, kDim, kValueDim>(DType::kFloat16)};
  return kernels;
}

}  // namespace distca::attention::cuda
