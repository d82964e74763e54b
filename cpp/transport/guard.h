// Waits for words that peers write, in the order of a stream, on a device or on what stands for one. A wait that fails
// records who waited for whom, for what, and what was seen. What comes later on the context's streams sees that and
// does nothing. A kernel and the host run the same code.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace distca::transport {

enum class Awaited : uint32_t { kNothing = 0, kCredit, kRowsIn, kRowsHome };

/// A record of a wait that lasted too long, in memory that the host reads. It is complete once `is_set` is 1.
struct StreamFault {
  uint32_t is_set = 0;
  int32_t peer = -1;
  Awaited awaited = Awaited::kNothing;
  int64_t round = 0;
  uint64_t seen = 0, expected = 0;
};

/// The memory that is needed to wait and to stop.
struct Guard {
  uint32_t* stopped = nullptr;             // the device's memory: 1 once a wait has failed
  const uint32_t* told_to_stop = nullptr;  // the host's memory: 1 once the host stops the streams
  StreamFault* fault = nullptr;            // the host's memory, too
  uint64_t timeout_ns = 0;
};

/// One message to await.
struct AwaitedMessage {
  const uint64_t* word;
  uint64_t value;
  int32_t peer;
  Awaited what;
  int64_t round;
};

#ifdef __CUDACC__
#define DISTCA_DEVICE_OR_HOST __device__ inline

DISTCA_DEVICE_OR_HOST uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
DISTCA_DEVICE_OR_HOST void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
DISTCA_DEVICE_OR_HOST bool is_set(const uint32_t* flag) { return *static_cast<volatile const uint32_t*>(flag) != 0; }
DISTCA_DEVICE_OR_HOST void set(uint32_t* flag) { *static_cast<volatile uint32_t*>(flag) = 1; }
/// Sets the flag, and returns true to the first caller.
DISTCA_DEVICE_OR_HOST bool set_first(uint32_t* flag) { return atomicCAS(flag, 0u, 1u) == 0; }
DISTCA_DEVICE_OR_HOST void fence() { __threadfence_system(); }
DISTCA_DEVICE_OR_HOST uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
DISTCA_DEVICE_OR_HOST void pause() { __nanosleep(100); }

#else
#define DISTCA_DEVICE_OR_HOST inline

DISTCA_DEVICE_OR_HOST uint64_t load_acquire(const uint64_t* word) {
  return std::atomic_ref(*const_cast<uint64_t*>(word)).load(std::memory_order_acquire);
}
DISTCA_DEVICE_OR_HOST void store_release(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
DISTCA_DEVICE_OR_HOST bool is_set(const uint32_t* flag) {
  return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire) != 0;
}
DISTCA_DEVICE_OR_HOST void set(uint32_t* flag) { std::atomic_ref(*flag).store(1u, std::memory_order_release); }
DISTCA_DEVICE_OR_HOST bool set_first(uint32_t* flag) { return std::atomic_ref(*flag).exchange(1u) == 0; }
DISTCA_DEVICE_OR_HOST void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
DISTCA_DEVICE_OR_HOST uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
DISTCA_DEVICE_OR_HOST void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

#endif

DISTCA_DEVICE_OR_HOST bool is_stopped(const Guard& g) {
  return is_set(g.stopped) || (g.told_to_stop != nullptr && is_set(g.told_to_stop));
}

/// Called by one thread. Returns true once *word >= value, and false once the streams have stopped. A wait that lasts
/// too long stops them, for what comes later on them and for the host.
DISTCA_DEVICE_OR_HOST bool await(const Guard& g, const AwaitedMessage& m) {
  const uint64_t start = nanoseconds();
  for (uint32_t turn = 1;; ++turn) {
    const uint64_t seen = load_acquire(m.word);
    if (seen >= m.value) return true;
    if (turn % 64 != 0) continue;
    if (is_stopped(g)) return false;
    if (nanoseconds() - start > g.timeout_ns) {
      if (set_first(g.stopped)) {
        *g.fault = {0, m.peer, m.what, m.round, seen, m.value};
        fence();
        set(&g.fault->is_set);
      }
      return false;
    }
    pause();
  }
}

}  // namespace distca::transport
