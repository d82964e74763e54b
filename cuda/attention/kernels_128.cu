#include "attention/instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_128() { return head_kernels<128, 128>(); }

}  // namespace distca::attention::cuda
