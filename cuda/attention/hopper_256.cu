#include "attention/hopper_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_256() { return hopper_kernels<256, 256>(); }

}  // namespace distca::attention::cuda
