// The compiled kernels and what the work list has to know of each: plain data, one row a head dimension and dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "attention/tables.h"

namespace distca::attention::cuda {

/// Starts a pass on `num_ctas` CTAs.
using Launch = cudaError_t (*)(const KernelParams& params, int num_ctas, cudaStream_t stream);

/// The kernels of heads up to dim and v_dim of one dtype. Rows of query tiles and keys of blocks belong to the
/// numerics: they depend on the head shape alone.
struct HeadKernels {
  DType dtype;
  int dim;
  int v_dim;
  int forward_rows;
  int forward_keys;
  Launch forward;
  int backward_rows;
  int backward_keys;
  int turns_per_tile;  // parts of a tile's dq that are added to one by one
  Launch backward;
  Launch store_queries;
};

/// For compute capability 9.0, ascending by dim.
std::span<const HeadKernels> hopper_kernels();

}  // namespace distca::attention::cuda
