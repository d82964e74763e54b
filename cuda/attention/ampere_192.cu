#include "attention/ampere_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> ampere_kernels_192() { return ampere_kernels<192, 128>(); }

}  // namespace distca::attention::cuda
