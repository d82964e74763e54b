// What nvcc brings to a .cu file, on the host: a kernel is a function that is called for each thread. Two things are
// written otherwise before a compiler sees them (emulated_gpu.py): `kernel<<<grid, ...>>>(...)` as `launch`, and shared
// memory as `shared`.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulated_gpu {

/// Where a thread is, set whenever it goes on.
struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern thread_local Place place;

/// The GPU's compute capability is this one .0: 8 or 9.
inline std::atomic<int> compute_capability_major = 9;

constexpr int kNumSms = 4;

struct Launch {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

/// A kernel with its arguments, ready to be queued.
struct Kernel {
  const char* name;
  const void* address;
  std::vector<const void*> words;  // of its arguments, addresses among them
  std::function<void()> thread;    // what each thread calls
};
void start_kernel(const Launch& how, Kernel kernel);
/// Ends the program if no GPU takes such a launch; loads the kernel.
void check_launch(const Launch& how, const Kernel& kernel);
/// The same for kernels written in the instructions of hopper.h or ampere.h: on the emulated machine.
void start_on_machine(const Launch& how, Kernel kernel);

template <class... Arguments>
Kernel with_arguments(const char* name, void (*kernel)(Arguments...), std::type_identity_t<Arguments>... arguments) {
  static_assert((std::is_trivially_copyable_v<Arguments> && ...), "arguments of a kernel are copied as bytes");
  std::vector<const void*> words;
  const auto add_words = [&words](const auto& argument) {
    for (size_t at = 0; at + sizeof(void*) <= sizeof(argument); at += sizeof(void*)) {
      const void* word;
      std::memcpy(&word, reinterpret_cast<const std::byte*>(&argument) + at, sizeof(word));
      words.push_back(word);
    }
  };
  (add_words(arguments), ...);
  return {name, reinterpret_cast<const void*>(kernel), std::move(words), [=] { kernel(arguments...); }};
}

/// The block's shared memory that is declared on that line of the kernel; full of ones before the first thread runs.
void* shared_of_line(int line, size_t bytes);
template <class T>
T& shared(int line) {
  return *static_cast<T*>(shared_of_line(line, sizeof(T)));
}
/// The part whose size the launch says, on the emulated machine.
std::byte* dynamic_shared();

void meet_block();
/// All lanes of a warp give a word; each gets that of the lane whose number differs in the bits of `lane_mask`.
uint64_t exchange(uint64_t word, unsigned lane_mask);

}  // namespace emulated_gpu

#define threadIdx (emulated_gpu::place.thread)
#define blockIdx (emulated_gpu::place.block)
#define blockDim (emulated_gpu::place.block_size)
#define gridDim (emulated_gpu::place.grid_size)

inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline void __syncthreads() { emulated_gpu::meet_block(); }
inline void __syncwarp() { emulated_gpu::exchange(0, 0); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

/// Of all 32 lanes: no kernel has another mask.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (mask != 0xffffffffu) __builtin_trap();
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = emulated_gpu::exchange(word, static_cast<unsigned>(lane_mask));
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

template <class T>
T atomicAdd(T* to, T value) {
  return std::atomic_ref(*to).fetch_add(value);
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
