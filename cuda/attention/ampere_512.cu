#include "attention/ampere_instances.h"

namespace distca::attention::cuda {

std::span<const HeadKernels> ampere_kernels_512() { return ampere_kernels<512, 512>(); }

}  // namespace distca::attention::cuda
