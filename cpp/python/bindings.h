// The parts of distca._C: each adds its classes and functions to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace distca::python {

void bind_plans(pybind11::module_& m);
void bind_transports(pybind11::module_& m);
void bind_contexts(pybind11::module_& m);

/// From now on waits of the core let Python's handlers of signals run, and end if one of them raises.
void watch_signals();
/// Raises an error in the main thread as soon as Python runs there: where the caller returns to, or a little later.
/// Needs the GIL.
void raise_later(pybind11::error_already_set error);
/// Raises the first error that is to be raised later. Returns false if there is none. Needs the GIL.
bool raise_pending();

/// Python that the core calls meanwhile is not where an error of raise_later comes up: it would take it for its own.
/// Needs the GIL.
class RaiseAfterwards {
 public:
  RaiseAfterwards();
  RaiseAfterwards(const RaiseAfterwards&) = delete;
  RaiseAfterwards& operator=(const RaiseAfterwards&) = delete;
  ~RaiseAfterwards();
};

}  // namespace distca::python
