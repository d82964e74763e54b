// The parts of distca.testing._emulation: each adds its classes and functions to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace distca::emulation {

void bind_contexts(pybind11::module_& m);
void bind_words(pybind11::module_& m);

}  // namespace distca::emulation
