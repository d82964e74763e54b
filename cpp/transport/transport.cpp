#include "transport/transport.h"

#include <algorithm>
#include <thread>

#include "common/interrupt.h"

namespace distca::transport {
namespace {

using Clock = std::chrono::steady_clock;

// The spins catch a signal that is on its way. The yields are for ranks that share a core. After them the thread
// sleeps.
constexpr int kNumSpins = 64;
constexpr int kNumYields = 8;
// The longest sleep between two calls of `idle`, in which a peer's death may go unnoticed.
constexpr std::chrono::microseconds kDoze{4000};
// Between two looks for signals of the process, which may take until another thread lets go of Python's lock.
constexpr std::chrono::milliseconds kInterruptCheck{100};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

bool Transport::wait(int64_t word, uint64_t value, Clock::time_point deadline, const std::function<void()>& idle) {
  Clock::time_point next_check{};
  for (int round = 0;; ++round) {
    const uint32_t seen = doorbell();  // before the load, so that a signal after the load ends the sleep
    if (load(word) >= value) return true;
    progress();
    if (round < kNumSpins) {
      pause();
    } else if (round < kNumSpins + kNumYields) {
      std::this_thread::yield();
    } else {
      round = kNumSpins + kNumYields;
      if (idle) idle();
      const Clock::time_point now = Clock::now();
      if (now >= next_check) {
        if (next_check != Clock::time_point{}) check_interrupt();  // not in waits that are short
        next_check = now + kInterruptCheck;
      }
      const auto left = std::chrono::ceil<std::chrono::microseconds>(deadline - now);
      if (left.count() <= 0) return load(word) >= value;
      doze(seen, std::min(left, kDoze));
    }
  }
}

}  // namespace distca::transport
