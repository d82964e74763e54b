#include "attention/instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_256() { return head_kernels<256, 256>(); }

}  // namespace distca::attention::cuda
