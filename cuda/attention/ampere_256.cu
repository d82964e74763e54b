#include "attention/ampere_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> ampere_kernels_256() { return ampere_kernels<256, 256>(); }

}  // namespace distca::attention::cuda
