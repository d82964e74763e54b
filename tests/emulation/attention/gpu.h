// What cuda/attention/gpu.h declares, for the emulated machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention/tables.h"
#include "machine.h"

#define DISTCA_DEVICE inline

namespace distca::attention::cuda::gpu {

using emulation::fail;
using emulation::machine;

struct BFloat16 {};
struct Float16 {};

// ---- threads

inline int thread_of_cta() { return machine->fiber().thread; }
inline int cta() { return machine->cta().index; }

inline void meet(emulation::NamedBarrier& barrier, int threads, bool wait) {
  if (!machine->fiber().instructions.empty()) fail("a barrier comes before the end of a warp's products");
  if (barrier.arrived != 0 && barrier.threads != threads) fail("threads disagree on the size of a named barrier");
  barrier.threads = threads;
  const uint64_t generation = barrier.generation;
  ++barrier.lanes[thread_of_cta() / 32];
  if (++barrier.arrived == threads) {
    for (const auto& [warp, lanes] : barrier.lanes)
      if (lanes % 32 != 0) fail("a part of a warp comes to a named barrier");
    barrier.lanes.clear();
    barrier.arrived = 0;
    ++barrier.generation;
  }
  if (wait) machine->await("a named barrier", [&barrier, generation] { return barrier.generation != generation; });
}
inline void sync_cta() { meet(machine->cta().named[8], static_cast<int>(machine->cta().queues.size()) * 128, true); }
inline emulation::NamedBarrier& named(int barrier) {
  if (barrier < 0 || barrier > 7) fail("a named barrier that does not exist");
  return machine->cta().named[barrier];
}
inline void sync_named(int barrier, int threads) { meet(named(barrier), threads, true); }
inline void arrive_named(int barrier, int threads) { meet(named(barrier), threads, false); }

/// All lanes give a value; each gets that of lane `source`.
template <class T>
T exchange(T value, int source) {
  static_assert(sizeof(T) <= 8);
  emulation::Exchange& e = machine->cta().exchanges[static_cast<size_t>(thread_of_cta() / 32)];
  // Two rounds, so that a fast lane does not overwrite what a slow one has yet to read.
  std::memcpy(&e.values[thread_of_cta() % 32], &value, sizeof(T));
  T result{};
  for (int round = 0; round < 2; ++round) {
    const uint64_t generation = e.generation;
    if (++e.arrived == 32) {
      e.arrived = 0;
      ++e.generation;
    }
    machine->await("the lanes of its warp", [&e, generation] { return e.generation != generation; });
    if (round == 0) std::memcpy(&result, &e.values[source], sizeof(T));
  }
  return result;
}
template <class T>
T shuffle_xor(T value, int lane_mask) {
  return exchange(value, (thread_of_cta() % 32) ^ lane_mask);
}
template <class T>
T shuffle_from(T value, int lane) {
  if (lane < 0 || lane > 31) fail("a shuffle from a lane that does not exist");
  return exchange(value, lane);
}
inline void sync_warp() { exchange(0, 0); }
inline bool any_lane(bool is) {
  for (int step = 1; step < 32; step *= 2) is |= shuffle_xor(is, step);
  return is;
}

// ---- arithmetic

inline float product(float a, float b) { return a * b; }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1.f / x; }
template <class Element>
uint32_t pack(float low, float high) {
  const auto round = std::is_same_v<Element, BFloat16> ? float_to_bf16 : float_to_fp16;
  return round(low) | static_cast<uint32_t>(round(high)) << 16;
}

// ---- memory

struct alignas(16) Words4 {
  uint32_t x[4];
};
inline void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail("an access that is not aligned");
}
inline void store_global(void* p, const Words4& words) {
  check_aligned(p, 16);
  std::memcpy(p, &words, 16);
}
inline int fetch_add(int* p, int n) {
  const int old = *p;
  *p += n;
  return old;
}
inline float load_relaxed(const float* p) { return *p; }
inline void keep_larger(int* p, int n) { *p = std::max(*p, n); }
inline void keep_smaller(unsigned* p, unsigned n) { *p = std::min(*p, n); }
inline void add_global(float* p, float a) {
  check_aligned(p, 4);
  *p += a;
}
inline void add_global(float* p, float a, float b) {
  check_aligned(p, 8);
  p[0] += a, p[1] += b;
}
inline int load_acquire(const int* p) { return *p; }
/// Of counters of turns: each is one more than the one before, or they were not taken in order.
inline void store_release(int* p, int value) {
  if (*p + 1 != value) fail("turns are not taken in order");
  if (machine->fiber().adds_to_do != 0) fail("a turn is passed while an add is under way");
  *p = value;
}
inline void fence_gpu() {}
/// Of each warp, the lanes that have looked at a signal and have not fenced all memory since.
inline uint32_t& news() { return machine->cta().news[static_cast<size_t>(thread_of_cta() / 32)]; }
inline uint64_t load_signal(const uint64_t* p) {
  news() |= 1u << thread_of_cta() % 32;
  return *p;
}
/// A kernel that looks again and again at what never changes is found by its sheer number of looks.
inline void pause() {
  static int looks = 0;
  if (++looks > 20000000) fail("a kernel waits for a word that nobody changes");
  machine->await("a word in memory", [] { return true; });  // now and then it lets others run
}

inline void await_signal(const uint64_t* p, uint64_t value) {
  while (load_signal(p) < value) pause();
}
inline void await_word(const int* p, int value) {
  while (load_acquire(p) != value) pause();
}

}  // namespace distca::attention::cuda::gpu
