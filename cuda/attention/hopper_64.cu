#include "attention/hopper_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_64() { return hopper_kernels<64, 64>(); }

}  // namespace distca::attention::cuda
