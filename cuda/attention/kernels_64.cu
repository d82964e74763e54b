#include "attention/instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_64() { return head_kernels<64, 64>(); }

}  // namespace distca::attention::cuda
