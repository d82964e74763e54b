// The instructions of all GPUs that the kernels use: threads of a warp, arithmetic, memory. A test can put another
// header in this one's place, as in those of hopper.h and ampere.h, and run the kernels on a host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention/tables.h"

namespace distca::attention::cuda::gpu {

#define DISTCA_DEVICE __device__ __forceinline__

struct BFloat16 {};
struct Float16 {};

// ---- threads

/// The number of this thread in the CTA. It is read anew each time and not kept in a register.
DISTCA_DEVICE int thread_of_cta() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
DISTCA_DEVICE int cta() { return static_cast<int>(blockIdx.x); }
DISTCA_DEVICE void sync_cta() { __syncthreads(); }
DISTCA_DEVICE void sync_warp() { __syncwarp(); }
template <class T>
DISTCA_DEVICE T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
template <class T>
DISTCA_DEVICE T shuffle_from(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
/// Whether it is so for a lane of the warp.
DISTCA_DEVICE bool any_lane(bool is) { return __any_sync(0xffffffffu, is); }

// ---- arithmetic

/// The product is never fused with what comes after. Therefore results do not depend on the compiler's choice.
DISTCA_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
DISTCA_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
/// 2^x, within two units of the last place; 0 for -inf, 1 for 0.
DISTCA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x; 0 for inf.
DISTCA_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Two elements, rounded to nearest even, with the first in the low half.
template <class Element>
DISTCA_DEVICE uint32_t pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<Element, BFloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// ---- memory

struct alignas(16) Words4 {
  uint32_t x[4];
};

DISTCA_DEVICE void store_global(void* p, const Words4& words) {
  *static_cast<uint4*>(p) = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
}
DISTCA_DEVICE int fetch_add(int* p, int n) { return atomicAdd(p, n); }
/// Reads what other threads of the GPU may be writing.
DISTCA_DEVICE float load_relaxed(const float* p) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(p) : "memory");
  return value;
}
DISTCA_DEVICE void keep_larger(int* p, int n) { atomicMax(p, n); }
DISTCA_DEVICE void keep_smaller(unsigned* p, unsigned n) { atomicMin(p, n); }
/// Adds to p, at the memory.
DISTCA_DEVICE void add_global(float* p, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(a) : "memory");
}
/// Adds to p[0] and p[1]. p is a multiple of 8 bytes.
DISTCA_DEVICE void add_global(float* p, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a), "f"(b) : "memory");
#else
  add_global(p, a);
  add_global(p + 1, b);
#endif
}
DISTCA_DEVICE int load_acquire(const int* p) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
DISTCA_DEVICE void store_release(int* p, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
/// Orders this thread's accesses to global memory before its later ones, for the whole GPU.
DISTCA_DEVICE void fence_gpu() { __threadfence(); }
/// Reads a word that another device may be writing.
DISTCA_DEVICE uint64_t load_signal(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

/// Pauses between two looks at something that others change.
DISTCA_DEVICE void pause() { __nanosleep(100); }

/// Waits until a signal has a value. Only the last look acquires: that empties the multiprocessor's L1 cache.
DISTCA_DEVICE void await_signal(const uint64_t* p, uint64_t value) {
  for (uint64_t now = 0;;) {
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(now) : "l"(p) : "memory");
    if (now >= value) break;
    pause();
  }
  load_signal(p);
}
/// The same for a word of this GPU, which has to have just this value.
DISTCA_DEVICE void await_word(const int* p, int value) {
  for (int now = 0;;) {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(p) : "memory");
    if (now == value) break;
    pause();
  }
  load_acquire(p);
}

}  // namespace distca::attention::cuda::gpu
