#include "common/interrupt.h"

#include <atomic>

namespace distca {
namespace {

// Global, because signals are. Null where the process has no Python.
std::atomic<InterruptCheck> installed{nullptr};

}  // namespace

void set_interrupt_check(InterruptCheck check) noexcept { installed = check; }

void check_interrupt() {
  const InterruptCheck check = installed;
  if (check == nullptr) return;
  if (const std::string raised = check(); !raised.empty()) throw Interrupted("interrupted by " + raised);
}

}  // namespace distca
