#include "attention/ampere_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> ampere_kernels_128() { return ampere_kernels<128, 128>(); }

}  // namespace distca::attention::cuda
