// distca.testing._emulation: what tests and benchmarks need of the core and training does not. Its types are in
// python/distca/testing/_emulation.pyi. Classes and errors are those of distca._C.
#include "emulation/python/bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_emulation, m) {
  m.doc() = "Emulated links, streams, hosts and attention, and doors into contexts and transports, for tests.";
  py::module_::import("distca._C");
  distca::emulation::bind_contexts(m);
  distca::emulation::bind_words(m);
}
