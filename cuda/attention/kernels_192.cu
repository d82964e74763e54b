#include "attention/instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> hopper_kernels_192() { return head_kernels<192, 128>(); }

}  // namespace distca::attention::cuda
