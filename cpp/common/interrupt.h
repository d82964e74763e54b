// Waits that end when their process is told to.
//
// A signal's handler in Python runs between two of Python's own instructions, and a wait in C++ has none. Therefore
// waits ask now and then, and whoever knows Python answers (cpp/python/interrupt.cpp).
#pragma once

#include <string>

#include "common/error.h"

namespace distca {

/// A handler of a signal raised an error while this process waited. Python raises that error itself afterwards.
class DISTCA_EXPORT Interrupted : public OperatingSystemError {
 public:
  using OperatingSystemError::OperatingSystemError;
};

/// Lets handlers of signals run that are due in this thread. Returns what they raised, in words; empty if nothing.
using InterruptCheck = std::string (*)();
DISTCA_EXPORT void set_interrupt_check(InterruptCheck check) noexcept;

/// Throws Interrupted if a handler of a signal raises. It may wait for Python's lock: call it in waits that already
/// take long.
void check_interrupt();

}  // namespace distca
