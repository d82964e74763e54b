// Signals while the core waits, and errors that Python raises later, in a place where it can.
#include "common/interrupt.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <deque>
#include <string>

#include "python/bindings.h"

namespace py = pybind11;

namespace distca::python {
namespace {

// Errors that wait to be raised. Guarded by the GIL, and never destroyed: the interpreter may be gone before.
std::deque<py::error_already_set>& pending() {
  static auto* const instance = new std::deque<py::error_already_set>;
  return *instance;
}

int num_held = 0;  // guarded by the GIL, too

/// What CPython calls in the main thread.
int raise_pending_call(void* /*unused*/) { return num_held == 0 && raise_pending() ? -1 : 0; }

/// Fails if 32 calls wait already; then one of those raises.
void ask_for_call() { Py_AddPendingCall(&raise_pending_call, nullptr); }

/// Handlers run in the main thread alone. Others do not ask for the GIL, which they might wait for.
std::string run_signal_handlers() {
  if (::gettid() != ::getpid() || Py_IsInitialized() == 0) return {};
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return {};
  py::error_already_set error;
  std::string name = py::str(error.type().attr("__name__"));
  raise_later(std::move(error));
  return name;
}

}  // namespace

void raise_later(py::error_already_set error) {
  pending().push_back(std::move(error));
  ask_for_call();
}

RaiseAfterwards::RaiseAfterwards() { ++num_held; }

RaiseAfterwards::~RaiseAfterwards() {
  if (--num_held > 0) return;
  for (size_t i = 0; i < pending().size(); ++i) ask_for_call();  // the calls for them may be over
}

bool raise_pending() {
  if (pending().empty()) return false;
  const py::error_already_set error = std::move(pending().front());
  pending().pop_front();
  PyErr_SetObject(error.type().ptr(), error.value().ptr());  // during another error, which it names as its context
  return true;
}

void watch_signals() { set_interrupt_check(&run_signal_handlers); }

}  // namespace distca::python
