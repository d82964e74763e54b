// The program of `make sanitize` is linked with what distca loads from libdistca_emulation.
#include "attention/micro_kernel.h"

#if defined(__x86_64__)
extern "C" const distca::attention::EmulatedKernels* distca_emulated_kernels();
#endif

namespace distca::attention {

const EmulatedKernels* emulated_kernels() {
#if defined(__x86_64__)
  return distca_emulated_kernels();
#else
  return nullptr;
#endif
}

}  // namespace distca::attention
