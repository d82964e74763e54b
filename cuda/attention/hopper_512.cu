#include "attention/hopper_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_512() { return hopper_kernels<512, 512>(); }

}  // namespace distca::attention::cuda
