// The compiled kernels and what the launcher has to know of each: plain data, one row a head dimension and dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "attention/tables.h"
#include "attention/work_list.h"

namespace distca::attention::cuda {

/// Starts a pass on `num_ctas` CTAs.
using Launch = cudaError_t (*)(const KernelParams& params, int num_ctas, cudaStream_t stream);

/// The kernels of heads up to dim and v_dim of one dtype. Tile shapes belong to the numerics: they depend on the head
/// shape alone.
struct HeadKernels {
  DType dtype;
  int dim;
  int v_dim;
  TileShape forward_shape;
  Launch forward;
  TileShape backward_shape;
  int dq_elements;     // of a tile's sums
  int turns_per_tile;  // parts of them that are added to one by one
  Launch backward;
  Launch store_queries;
  cudaError_t (*load)();  // them, before they are first started
};

// For compute capability 9.0, one file each. The first that a head fits into is the one for it.
std::span<const HeadKernels> hopper_kernels_64();
std::span<const HeadKernels> hopper_kernels_128();
std::span<const HeadKernels> hopper_kernels_192();
std::span<const HeadKernels> hopper_kernels_256();

}  // namespace distca::attention::cuda
