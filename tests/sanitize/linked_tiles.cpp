// Emulated tiles, linked into the program of `make sanitize`, which has no libraries to load them from.
#include "attention/micro_kernel.h"

namespace distca::attention {

#if defined(__x86_64__)
extern const InstructionSet kInstructionSet_amx_emulated;
const InstructionSet* emulated_tiles() { return &kInstructionSet_amx_emulated; }
#else
const InstructionSet* emulated_tiles() { return nullptr; }
#endif

}  // namespace distca::attention
