#include "attention/hopper_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_192() { return hopper_kernels<192, 128>(); }

}  // namespace distca::attention::cuda
