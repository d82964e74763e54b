// The tables of emulated instructions are in a library that tests use and nothing else. It is loaded when they are
// asked for by name.
#include "attention/micro_kernel.h"
#include "common/optional_library.h"

namespace distca::attention {

const EmulatedKernels* emulated_kernels() {
  static const auto library =
      load_optional_library<EmulatedKernels>("libdistca_emulation.so", "distca_emulated_kernels");
  return library.offer;
}

}  // namespace distca::attention
