// A stack of its own for a function that stops in the middle and goes on later. Without the system calls that
// swapcontext makes to keep the mask of signals.
#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace emulation {

class Stack {
 public:
  /// `run` ends by calling `stop`, after which nobody resumes it.
  Stack(size_t bytes, std::function<void()> run)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(bytes)), run_(std::move(run)) {
    getcontext(&begin_);
    begin_.uc_stack.ss_sp = memory_.get();
    begin_.uc_stack.ss_size = bytes;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&begin_, reinterpret_cast<void (*)()>(&Stack::enter), 2, static_cast<uint32_t>(self),
                static_cast<uint32_t>(self >> 32));
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  /// Runs the function until it stops.
  void resume() {
    if (_setjmp(outside_) != 0) return;
    if (std::exchange(is_begun_, true)) _longjmp(inside_, 1);
    setcontext(&begin_);
  }
  /// Of the function: returns when it is resumed.
  void stop() {
    if (_setjmp(inside_) == 0) _longjmp(outside_, 1);
  }

 private:
  static void enter(uint32_t low, uint32_t high) {
    reinterpret_cast<Stack*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32)->run_();
  }

  std::unique_ptr<std::byte[]> memory_;
  std::function<void()> run_;
  ucontext_t begin_;
  jmp_buf inside_, outside_;
  bool is_begun_ = false;
};

}  // namespace emulation
