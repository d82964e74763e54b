#include "attention/hopper_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_128() { return hopper_kernels<128, 128>(); }

}  // namespace distca::attention::cuda
