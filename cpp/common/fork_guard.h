// What must not survive a fork: descriptors whose closing is news to a peer, and the use of shared memory.
//
// A forked child (a data loader's worker, say) inherits every descriptor. A socket that stays open there would hide the
// death of its parent from the peers, so a handler closes them in the child before fork returns.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "common/error.h"

namespace distca {

/// Starts counting forks; the first call of a process installs the handler.
void watch_forks();

/// The number of forks that lie between the first `watch_forks` and this process. Differs in a forked child.
DISTCA_EXPORT uint32_t fork_generation();

/// Owns a file descriptor that is closed in forked children.
class DISTCA_EXPORT Descriptor {
 public:
  Descriptor() = default;
  /// Takes what `make` returns; no fork can come between its making and its being known. -1 is kept, errno too.
  explicit Descriptor(const std::function<int()>& make);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
    return *this;
  }

  /// -1 where there is none, and in a forked child.
  int get() const { return generation_ == fork_generation() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
  uint32_t generation_ = 0;
};

}  // namespace distca
