// The compiled kernels and what the launcher must know of each, as plain data: one row for each head dimension and
// dtype.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "attention/tables.h"
#include "attention/work_list.h"

namespace distca::attention::cuda {

/// Starts one kernel for up to `num_items` items on a device with so many multiprocessors.
using Launch = cudaError_t (*)(const KernelParams& params, int num_items, int num_sms, cudaStream_t stream);

/// The kernels for heads up to dim and v_dim of one dtype. Tile shapes are part of the numerics and therefore depend on
/// the head shape alone.
struct HeadKernels {
  DType dtype;
  int dim;
  int v_dim;
  TileShape forward_shape;
  Launch forward;
  TileShape backward_shape;
  int dq_elements;     // elements of a tile's sums of dq
  int turns_per_tile;  // parts of these sums, each of which has turns of its own
  int passes;          // starts of the kernel, each for a part of the columns
  Launch backward;
  Launch store_queries;
  cudaError_t (*load)();  // loads these kernels, before they are first started
};

// The kernels for compute capability 9.0, and those for 8.0 and later, one file each. A head takes the first ones that
// it fits into.
std::span<const HeadKernels> hopper_kernels_64();
std::span<const HeadKernels> hopper_kernels_128();
std::span<const HeadKernels> hopper_kernels_192();
std::span<const HeadKernels> hopper_kernels_256();
std::span<const HeadKernels> hopper_kernels_512();
std::span<const HeadKernels> ampere_kernels_64();
std::span<const HeadKernels> ampere_kernels_128();
std::span<const HeadKernels> ampere_kernels_192();
std::span<const HeadKernels> ampere_kernels_256();
std::span<const HeadKernels> ampere_kernels_512();

}  // namespace distca::attention::cuda
