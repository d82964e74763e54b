// The parts of distca._C: each adds its classes and functions to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace distca::python {

void bind_plans(pybind11::module_& m);
void bind_transports(pybind11::module_& m);
void bind_contexts(pybind11::module_& m);

}  // namespace distca::python
