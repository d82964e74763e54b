#include "attention/ampere_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> ampere_kernels_64() { return ampere_kernels<64, 64>(); }

}  // namespace distca::attention::cuda
