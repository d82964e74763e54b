// The tables of emulated tiles are in a library that tests use and nothing else. It is loaded when they are asked for
// by name.
#include "attention/micro_kernel.h"
#include "common/optional_library.h"

namespace distca::attention {

const InstructionSet* emulated_tiles() {
  static const auto library = load_optional_library<InstructionSet>("libdistca_emulation.so", "distca_emulated_tiles");
  return library.offer;
}

}  // namespace distca::attention
