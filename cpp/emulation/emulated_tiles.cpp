// Offers the CPU kernel with emulated tiles to the core, which loads this library when that kernel is asked for by
// name.
#include "attention/micro_kernel.h"
#include "common/error.h"

#if defined(__x86_64__)
namespace distca::attention {
extern const InstructionSet kInstructionSet_amx_emulated;
}

extern "C" DISTCA_EXPORT const distca::attention::InstructionSet* distca_emulated_tiles() {
  return &distca::attention::kInstructionSet_amx_emulated;
}
#endif
