// Waiting on the device for signal words that peers write, with a timeout. A wait that fails records who waited for
// whom, for what, and what was seen; every later kernel of this context sees that on entry and does nothing.
#pragma once

#include <cstdint>

namespace distca::cuda {

enum class Awaited : uint32_t { kNothing = 0, kCredit, kRowsIn, kRowsHome };

/// Why the context stopped, in memory that the host reads. Complete once `is_set` is 1.
struct DeviceFault {
  uint32_t is_set;
  int32_t peer;
  Awaited awaited;
  uint32_t is_told;  // 1: `peer` met a fault and said so, nothing timed out here
  int64_t round;
  uint64_t seen, expected;
};

/// What a kernel needs to wait and to fail.
struct Guard {
  uint32_t* aborted = nullptr;            // device memory: 1 once a wait of this context has failed
  DeviceFault* fault = nullptr;           // the host's memory, mapped
  const uint64_t* fault_codes = nullptr;  // own words, one a rank: not 0 once that rank has met a fault
  uint64_t* const* told_to = nullptr;     // the word of each peer for faults of this rank; null for itself
  uint64_t told_value = 0;                // what is written there
  int32_t num_ranks = 0;
  uint64_t timeout_ns = 0;
};

#ifdef __CUDACC__

__device__ inline uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

__device__ inline bool is_aborted(const Guard& g) { return *static_cast<volatile const uint32_t*>(g.aborted) != 0; }

/// Stops the context, if this is its first fault: for the kernels to come, for the host, and for the peers.
__device__ inline void stop(const Guard& g, const DeviceFault& fault) {
  if (atomicCAS(g.aborted, 0u, 1u) != 0) return;
  *g.fault = fault;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&g.fault->is_set) = 1;
  __threadfence_system();
  for (int32_t p = 0; p < g.num_ranks; ++p)
    if (g.told_to[p] != nullptr) store_release(g.told_to[p], g.told_value);
}

/// Of one thread: returns true once *word >= value, and false once the context has stopped, by this wait or another.
__device__ inline bool await(const Guard& g, const uint64_t* word, uint64_t value, int32_t peer, Awaited what,
                             int64_t round) {
  const uint64_t start = nanoseconds();
  for (uint32_t turn = 1;; ++turn) {
    const uint64_t seen = load_acquire(word);
    if (seen >= value) return true;
    if (turn % 64 != 0) continue;
    if (is_aborted(g)) return false;
    for (int32_t p = 0; p < g.num_ranks; ++p) {
      if (load_acquire(g.fault_codes + p) == 0) continue;
      stop(g, {0, p, what, 1, round, seen, value});
      return false;
    }
    if (nanoseconds() - start > g.timeout_ns) {
      stop(g, {0, peer, what, 0, round, seen, value});
      return false;
    }
    __nanosleep(100);
  }
}

#endif  // __CUDACC__

}  // namespace distca::cuda
