// Emulated instructions, linked into the program of `make sanitize`, which has no libraries to load them from.
#include "attention/micro_kernel.h"

namespace distca::attention {

#if defined(__x86_64__)
extern const InstructionSet kInstructionSet_avx512_bf16_emulated;
extern const InstructionSet kInstructionSet_amx_emulated;
const EmulatedKernels* emulated_kernels() {
  static constexpr EmulatedKernels kKernels = {&kInstructionSet_avx512_bf16_emulated, &kInstructionSet_amx_emulated};
  return &kKernels;
}
#else
const EmulatedKernels* emulated_kernels() { return nullptr; }
#endif

}  // namespace distca::attention
