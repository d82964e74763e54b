// A record of what a rank did when: the parts of its steps, and the waits and copies in them.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

namespace distca::runtime {

/// Times are those of the steady clock, which all processes of a host share.
struct Span {
  const char* name;  // "dispatch", "attend", "collect", or what is waited for in one of them
  bool is_wait;
  uint64_t step;
  int64_t slot;
  int64_t phase;  // 0 forward, 1 backward
  int64_t peer;   // the peer that is waited for, or -1
  int64_t begin_ns;
  int64_t end_ns;
};

/// Rows that this rank copied to a peer itself, in one of the parts of a step.
struct Copy {
  int64_t peer;
  int64_t bytes;
  int64_t begin_ns;
  int64_t end_ns;
};

/// It is off until it is turned on. Then it keeps every span and copy until they are taken.
class Trace {
 public:
  void set_on(bool on) { on_ = on; }
  bool is_on() const { return on_; }
  void add(const Span& span) { spans_.push_back(span); }
  void add(const Copy& copy) { copies_.push_back(copy); }
  std::vector<Span> take() { return std::exchange(spans_, {}); }
  std::vector<Copy> take_copies() { return std::exchange(copies_, {}); }

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

 private:
  bool on_ = false;
  std::vector<Span> spans_;
  std::vector<Copy> copies_;
};

}  // namespace distca::runtime
