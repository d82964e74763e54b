// The attention kernels that there are on the emulated GPU: none.
#include <cuda.h>

#include "attention/kernels.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_64() { return {}; }
std::span<const HeadKernels> hopper_kernels_128() { return {}; }
std::span<const HeadKernels> hopper_kernels_192() { return {}; }
std::span<const HeadKernels> hopper_kernels_256() { return {}; }

}  // namespace distca::attention::cuda

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
