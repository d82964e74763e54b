// Offers the variants of the CPU kernel whose instructions are emulated to the core, which loads this library when one
// of them is asked for by name.
#include "attention/micro_kernel.h"
#include "common/error.h"

#if defined(__x86_64__)
namespace distca::attention {
extern const InstructionSet kInstructionSet_avx512_bf16_emulated;
extern const InstructionSet kInstructionSet_amx_emulated;
}  // namespace distca::attention

extern "C" DISTCA_EXPORT const distca::attention::EmulatedKernels* distca_emulated_kernels() {
  using namespace distca::attention;
  static constexpr EmulatedKernels kKernels = {&kInstructionSet_avx512_bf16_emulated, &kInstructionSet_amx_emulated};
  return &kKernels;
}
#endif
