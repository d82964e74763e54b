// Runs the CUDA attention kernels on random problems on device 0 against naive kernels in fp32, and prints errors and
// TFLOP/s. It ends with 1 if a result is wrong, 2 if the device cannot run it.
//
// It stands alone: a machine with a GPU needs neither Python nor PyTorch for it. Arguments are names of problems, which
// alone are run then, and --ampere for the kernels of compute capability 8.0 and later, on any such GPU. It is linked
// with the objects of a build, as benchmarks/gpu_check.sh does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "attention/cuda_attention.h"

namespace {

using namespace distca;
using attention::cuda::CudaAttention;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

/// Device memory. Every byte is 0xff at first, which is NaN in every dtype.
template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t size = 0;

  explicit DeviceArray(size_t n) : size(n) {
    check(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)), "cudaMalloc");
    check(cudaMemset(data, 0xff, n * sizeof(T)), "cudaMemset");
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> x(size);
    check(cudaMemcpy(x.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return x;
  }
  void set(const std::vector<T>& x) {
    check(cudaMemcpy(data, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
};

// ---- the naive kernels: one document after another in [rows, heads, dim], everything in fp32

constexpr int kImageStep = 300;

struct Shape {
  int length, q_heads, kv_heads, dim, v_dim;
  int full, window;
  int image;  // of every kImageStep rows the first ones, that see each other
  float scale, softcap;

  __device__ bool sees(int row, int key) const {
    const bool same = row / kImageStep == key / kImageStep;
    const bool image_sees = same && row % kImageStep < image && key % kImageStep < image;
    return (full != 0 || key <= row || image_sees) && (window == 0 || (key > row - window && key < row + window));
  }
  __device__ float score(const float* q, const float* k, float* slope) const {
    float s = 0.f;
    for (int d = 0; d < dim; ++d) s += q[d] * k[d];
    s *= scale;
    *slope = scale;
    if (softcap != 0.f) {
      const float t = tanhf(s / softcap);
      s = softcap * t;
      *slope *= 1.f - t * t;
    }
    return s;
  }
};

/// Each thread computes one row of a query head.
__global__ void naive_forward(Shape s, const float* q, const float* k, const float* v, float* out, float* lse) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= s.length * s.q_heads) return;
  const int row = index / s.q_heads, head = index % s.q_heads, kv_head = head / (s.q_heads / s.kv_heads);
  const float* queries = q + static_cast<int64_t>(index) * s.dim;
  float highest = -INFINITY, slope;
  for (int key = 0; key < s.length; ++key)
    if (s.sees(row, key))
      highest =
          fmaxf(highest, s.score(queries, k + (static_cast<int64_t>(key) * s.kv_heads + kv_head) * s.dim, &slope));
  float sum = 0.f;
  float* sums = out + static_cast<int64_t>(index) * s.v_dim;
  for (int d = 0; d < s.v_dim; ++d) sums[d] = 0.f;
  for (int key = 0; key < s.length; ++key) {
    if (!s.sees(row, key)) continue;
    const int64_t at = static_cast<int64_t>(key) * s.kv_heads + kv_head;
    const float prob = expf(s.score(queries, k + at * s.dim, &slope) - highest);
    sum += prob;
    for (int d = 0; d < s.v_dim; ++d) sums[d] += prob * v[at * s.v_dim + d];
  }
  for (int d = 0; d < s.v_dim; ++d) sums[d] /= sum;
  lse[index] = highest + logf(sum);
}

/// Each thread computes one row of a query head, and adds to dk and dv atomically.
__global__ void naive_backward(Shape s, const float* q, const float* k, const float* v, const float* dout,
                               const float* lse, const float* delta, float* dq, float* dk, float* dv) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= s.length * s.q_heads) return;
  const int row = index / s.q_heads, head = index % s.q_heads, kv_head = head / (s.q_heads / s.kv_heads);
  const int64_t at_q = static_cast<int64_t>(index) * s.dim, at_out = static_cast<int64_t>(index) * s.v_dim;
  for (int d = 0; d < s.dim; ++d) dq[at_q + d] = 0.f;
  for (int key = 0; key < s.length; ++key) {
    if (!s.sees(row, key)) continue;
    const int64_t at = static_cast<int64_t>(key) * s.kv_heads + kv_head;
    float slope, dp = 0.f;
    const float prob = expf(s.score(q + at_q, k + at * s.dim, &slope) - lse[index]);
    for (int d = 0; d < s.v_dim; ++d) {
      dp += v[at * s.v_dim + d] * dout[at_out + d];
      atomicAdd(dv + at * s.v_dim + d, prob * dout[at_out + d]);
    }
    const float ds = prob * (dp - delta[index]) * slope;
    for (int d = 0; d < s.dim; ++d) {
      dq[at_q + d] += ds * k[at * s.dim + d];
      atomicAdd(dk + at * s.dim + d, ds * q[at_q + d]);
    }
  }
}

/// delta [rows * heads]: the sum over a row of out times its gradient, both as they were rounded.
__global__ void naive_delta(Shape s, const float* out, const float* dout, float* delta) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index >= s.length * s.q_heads) return;
  const int64_t at = static_cast<int64_t>(index) * s.v_dim;
  float sum = 0.f;
  for (int d = 0; d < s.v_dim; ++d) sum += out[at + d] * dout[at + d];
  delta[index] = sum;
}

// ---- a problem

__device__ float to_float(DType dtype, uint16_t x) {
  return dtype == DType::kBFloat16 ? __bfloat162float(__ushort_as_bfloat16(x)) : __half2float(__ushort_as_half(x));
}

/// A number that looks random (the finaliser of MurmurHash3).
__device__ uint32_t hashed(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

/// Normally distributed elements, and the same values in fp32.
__global__ void fill_normal(DType dtype, uint32_t seed, uint16_t* words, float* exact, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t first = hashed(seed ^ hashed(static_cast<uint32_t>(i))), second = hashed(first + 0x9e3779b9u);
  const float radius = sqrtf(-2.f * logf((static_cast<float>(first >> 8) + 0.5f) * 0x1p-24f));
  const float x = radius * cospif(static_cast<float>(second >> 8) * 0x1p-23f);
  words[i] = dtype == DType::kBFloat16 ? __bfloat16_as_ushort(__float2bfloat16(x)) : __half_as_ushort(__float2half(x));
  exact[i] = to_float(dtype, words[i]);
}

__global__ void widen(DType dtype, const uint16_t* words, float* values, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) values[i] = to_float(dtype, words[i]);
}

/// A tensor in 16 bits as the kernels see it, and as many values in fp32.
struct Tensor {
  DType dtype;
  int64_t heads, dim;
  DeviceArray<uint16_t> device;
  DeviceArray<float> exact;

  Tensor(DType t, int64_t rows, int64_t h, int64_t d)
      : dtype(t), heads(h), dim(d), device(static_cast<size_t>(rows * h * d)), exact(device.size) {}

  unsigned grid() const { return static_cast<unsigned>((device.size + 255) / 256); }
  void fill(std::mt19937& random) {
    fill_normal<<<grid(), 256>>>(dtype, random(), device.data, exact.data, static_cast<int64_t>(device.size));
    check(cudaDeviceSynchronize(), "filling a tensor");
  }
  /// The elements in fp32, on the device. They are not those in `exact`.
  void widen_to(DeviceArray<float>& values) const {
    widen<<<grid(), 256>>>(dtype, device.data, values.data, static_cast<int64_t>(device.size));
    check(cudaDeviceSynchronize(), "widening a tensor");
  }
  RowView view() const { return {reinterpret_cast<std::byte*>(device.data), heads * dim * 2, dim * 2}; }
};

struct Setup {
  const char* name;
  HeadShape heads;
  Mask mask;
  int length;
  float softcap;
  bool compare;   // with the naive kernels; long ones are only timed
  int image = 0;  // see Shape

  std::vector<BidirectionalRows> bidirectional() const {
    std::vector<BidirectionalRows> rows;
    for (int64_t begin = 0; image > 0 && begin < length; begin += kImageStep)
      rows.push_back({begin, std::min<int64_t>(begin + image, length)});
    return rows;
  }
};

int failures = 0;

void compare(const char* name, const std::vector<float>& got, const std::vector<float>& right, double bound) {
  double squares = 0, of_right = 0, largest = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(right[i]);
    squares += d * d;
    of_right += static_cast<double>(right[i]) * static_cast<double>(right[i]);
    if (!(std::fabs(d) <= largest)) largest = std::fabs(d);
  }
  // With one key dq and dk are zero, and what is computed is the noise of sums in another order.
  const double typical = std::sqrt(std::max(of_right / static_cast<double>(right.size()), 1e-8));
  const double rms = std::sqrt(squares / static_cast<double>(right.size())) / typical;
  const bool good = rms <= bound;  // false for what is not a number
  std::printf("    %-4s rms %.2e of %.2e, largest %.2e%s\n", name, rms, bound, largest, good ? "" : "  WRONG");
  if (good) return;
  ++failures;
  size_t wrong = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    if (std::fabs(got[i] - right[i]) <= 0.1 * typical) continue;
    if (++wrong <= 8) std::printf("      element %zu is %g, not %g\n", i, got[i], right[i]);
  }
  std::printf("      %zu of %zu elements are far off\n", wrong, right.size());
}

std::vector<float> floats(const Tensor& t) {
  DeviceArray<float> values(t.device.size);
  t.widen_to(values);
  return values.host();
}

/// Milliseconds of one run: the mean of several after one to warm up.
template <class Run>
double time_of(const Run& run) {
  constexpr int kRuns = 5;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  run();
  check(cudaEventRecord(begin), "cudaEventRecord");
  for (int i = 0; i < kRuns; ++i) run();
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaEventSynchronize(end), "running the kernels");
  float milliseconds = 0.f;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds / kRuns;
}

/// Number of pairs of rows and keys that see each other.
double pairs(const Setup& setup) {
  double n = 0;
  const std::vector<BidirectionalRows> bidirectional = setup.bidirectional();
  const DocumentMask mask{setup.mask, bidirectional};
  for (int64_t row = 0; row < setup.length; ++row)
    n += static_cast<double>(mask.end_key(row, setup.length) - mask.first_key(row));
  return n;
}

/// Runs one document, cut into tasks at odd places. Its blocks of keys lie in two sources, in reversed order in the
/// second.
void run_setup(CudaAttention& kernel, const Setup& setup, std::mt19937& random) {
  const HeadShape& h = setup.heads;
  const int64_t n = setup.length, block = attention::kKeyBlockRows, num_blocks = (n + block - 1) / block;
  std::printf("%s: %s %lld/%lld, %lld heads on %lld, %d rows\n", setup.name, dtype_name(h.dtype),
              static_cast<long long>(h.dim), static_cast<long long>(h.v_dim), static_cast<long long>(h.q_heads),
              static_cast<long long>(h.kv_heads), setup.length);
  Tensor q(h.dtype, n, h.q_heads, h.dim), k(h.dtype, n, h.kv_heads, h.dim), v(h.dtype, n, h.kv_heads, h.v_dim);
  Tensor dout(h.dtype, n, h.q_heads, h.v_dim), out(h.dtype, n, h.q_heads, h.v_dim), dq(h.dtype, n, h.q_heads, h.dim);
  Tensor dk(h.dtype, n, h.kv_heads, h.dim), dv(h.dtype, n, h.kv_heads, h.v_dim);
  for (Tensor* t : {&q, &k, &v, &dout}) t->fill(random);
  DeviceArray<float> lse(static_cast<size_t>(n * h.q_heads)), delta(lse.size);

  // Every third block of keys lies in the second source and is NaN in the first.
  Tensor arena_k(h.dtype, num_blocks * block, h.kv_heads, h.dim);
  Tensor arena_v(h.dtype, num_blocks * block, h.kv_heads, h.v_dim);
  std::vector<int64_t> blocks;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const bool moved = b % 3 == 1;
    blocks.push_back(moved ? 2 * (num_blocks - 1 - b) * block + 1 : 2 * b * block);
    if (!moved) continue;
    const int64_t rows = std::min(block, n - b * block);
    for (const auto& [from, to] : {std::pair{&k, &arena_k}, {&v, &arena_v}}) {
      const size_t row = static_cast<size_t>(from->heads * from->dim) * 2;
      std::byte* source = reinterpret_cast<std::byte*>(from->device.data) + static_cast<size_t>(b * block) * row;
      std::byte* target =
          reinterpret_cast<std::byte*>(to->device.data) + static_cast<size_t>((num_blocks - 1 - b) * block) * row;
      check(cudaMemcpy(target, source, static_cast<size_t>(rows) * row, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      check(cudaMemset(source, 0xff, static_cast<size_t>(rows) * row), "cudaMemset");
    }
  }
  attention::KeyGroup group;
  const std::vector<BidirectionalRows> bidirectional = setup.bidirectional();
  group.kv_heads = h.kv_heads;
  group.bidirectional = bidirectional;
  group.kv_end = n;
  group.blocks = blocks;
  group.k[0] = k.view(), group.k[1] = arena_k.view();
  group.v[0] = v.view(), group.v[1] = arena_v.view();
  const attention::KeyGradRun run{0, n, h.dtype, dk.view(), dv.view()};
  group.grads = std::span(&run, 1);
  std::vector<attention::Task> tasks;
  const RowView lse_view{reinterpret_cast<std::byte*>(lse.data), h.q_heads * 4, 4};
  const RowView delta_view{reinterpret_cast<std::byte*>(delta.data), h.q_heads * 4, 4};
  for (int64_t row = 0; row < n;) {
    const int64_t end = std::min(n, row + n / 3 + 37);
    tasks.push_back({0, row, end, q.view().from_row(row), out.view().from_row(row), lse_view.from_row(row),
                     dout.view().from_row(row), delta_view.from_row(row), dq.view().from_row(row)});
    row = end;
  }
  group.task_end = static_cast<int64_t>(tasks.size());
  const float scale = 1.f / std::sqrt(static_cast<float>(h.dim));
  // The first scores are no group's.
  const attention::Scores scores[] = {{{MaskKind::kCausal, 1}, -3.f * scale, 7.f}, {setup.mask, scale, setup.softcap}};
  group.scores = 1;
  const attention::Problem problem{h, scores, std::span(&group, 1), tasks};

  const double roundoff = h.dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const Shape shape{setup.length,
                    static_cast<int>(h.q_heads),
                    static_cast<int>(h.kv_heads),
                    static_cast<int>(h.dim),
                    static_cast<int>(h.v_dim),
                    setup.mask.is_full() ? 1 : 0,
                    static_cast<int>(setup.mask.window),
                    setup.image,
                    scale,
                    setup.softcap};
  const auto num_rows = static_cast<unsigned>(n * h.q_heads);
  const unsigned grid = (num_rows + 127) / 128;
  if (setup.compare) {
    naive_forward<<<grid, 128>>>(shape, q.exact.data, k.exact.data, v.exact.data, out.exact.data, lse.data);
    check(cudaDeviceSynchronize(), "the naive forward kernel");
  }
  const std::vector<float> right_out = out.exact.host(), right_lse = lse.host();
  {
    kernel.prepare_forward(problem);
    DeviceArray<std::byte> scratch(kernel.scratch_bytes());
    const double ms = time_of([&] { kernel.run(scratch.data, nullptr); });
    std::printf("  forward %.3f ms, %.1f TFLOP/s\n", ms,
                pairs(setup) * static_cast<double>(h.q_heads * (h.dim + h.v_dim)) * 2e-9 / ms);
  }
  if (setup.compare) {
    compare("out", floats(out), right_out, roundoff);
    compare("lse", lse.host(), right_lse, 1e-5);
  }

  {
    DeviceArray<float> rounded(out.device.size);
    out.widen_to(rounded);
    naive_delta<<<grid, 128>>>(shape, rounded.data, dout.exact.data, delta.data);
    check(cudaDeviceSynchronize(), "the naive kernel of delta");
  }
  if (setup.compare) {
    check(cudaMemset(dk.exact.data, 0, dk.exact.size * 4), "cudaMemset");
    check(cudaMemset(dv.exact.data, 0, dv.exact.size * 4), "cudaMemset");
    naive_backward<<<grid, 128>>>(shape, q.exact.data, k.exact.data, v.exact.data, dout.exact.data, lse.data,
                                  delta.data, dq.exact.data, dk.exact.data, dv.exact.data);
    check(cudaDeviceSynchronize(), "the naive backward kernel");
  }
  std::vector<uint16_t> first_dq;
  for (const bool deterministic : {false, true, true}) {
    kernel.prepare_backward(problem, deterministic);
    DeviceArray<std::byte> scratch(kernel.scratch_bytes());
    const double ms = time_of([&] { kernel.run(scratch.data, nullptr); });
    std::printf("  backward%s %.3f ms, %.1f TFLOP/s\n", deterministic ? ", deterministic" : "", ms,
                pairs(setup) * static_cast<double>(h.q_heads * (3 * h.dim + 2 * h.v_dim)) * 2e-9 / ms);
    if (setup.compare) {
      compare("dq", floats(dq), dq.exact.host(), 1.5 * roundoff);
      compare("dk", floats(dk), dk.exact.host(), 1.5 * roundoff);
      compare("dv", floats(dv), dv.exact.host(), 1.5 * roundoff);
    }
    if (!deterministic) continue;
    const std::vector<uint16_t> words = dq.device.host();
    if (!first_dq.empty() && words != first_dq) {
      std::printf("    dq DIFFERS from run to run\n");
      ++failures;
    }
    first_dq = words;
  }
}

}  // namespace

int main(int num_arguments, char** arguments) {
  std::set<std::string> wanted(arguments + 1, arguments + num_arguments);
  std::optional<attention::cuda::KernelFamily> family;
  if (wanted.erase("--ampere") != 0) family = attention::cuda::KernelFamily::kAmpere;
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "looking for a CUDA device");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // shows where a kernel hangs
  std::printf("%s, %d SMs\n", device.name, device.multiProcessorCount);
  const DType bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  const Mask causal{}, full{MaskKind::kFull, 0};
  const Setup setups[] = {
      {"causal", {8, 2, 128, 128, bf16}, causal, 1111, 0.f, true},
      {"full", {5, 1, 128, 128, fp16}, full, 700, 0.f, true},
      {"window", {8, 8, 64, 64, bf16}, {MaskKind::kCausal, 200}, 1500, 0.f, true},
      {"full in a window", {8, 2, 128, 128, bf16}, {MaskKind::kFull, 130}, 1300, 0.f, true},
      {"images", {8, 2, 128, 128, bf16}, causal, 1111, 0.f, true, 200},
      {"images in a window", {8, 8, 64, 64, bf16}, {MaskKind::kCausal, 90}, 1500, 0.f, true, 160},
      {"softcap", {6, 2, 96, 96, bf16}, causal, 900, 2.f, true},
      {"latent", {4, 4, 192, 128, bf16}, causal, 900, 0.f, true},
      {"wide", {8, 4, 256, 256, fp16}, causal, 700, 0.f, true},
      {"widest", {8, 2, 512, 512, bf16}, causal, 700, 0.f, true},
      {"uneven", {6, 2, 264, 512, fp16}, causal, 700, 2.f, true},
      {"narrow values", {3, 1, 512, 8, bf16}, full, 333, 0.f, true},
      {"many blocks", {2, 1, 64, 64, bf16}, causal, 2500, 0.f, true},
      {"one row", {4, 2, 128, 128, bf16}, causal, 1, 0.f, true},
      {"long", {32, 8, 128, 128, bf16}, causal, 16384, 0.f, false},
      {"long", {32, 8, 64, 64, bf16}, causal, 16384, 0.f, false},
      {"long", {16, 16, 192, 128, bf16}, causal, 16384, 0.f, false},
      {"long", {16, 4, 256, 256, bf16}, causal, 16384, 0.f, false},
      {"long", {8, 2, 512, 512, bf16}, causal, 16384, 0.f, false},
      {"long", {32, 8, 128, 128, bf16}, full, 16384, 0.f, false},
  };
  try {
    CudaAttention kernel(0, family);
    std::mt19937 random(1);
    for (const Setup& setup : setups)
      if (wanted.empty() || wanted.contains(setup.name)) run_setup(kernel, setup, random);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  std::printf("%s\n", failures == 0 ? "all right" : "WRONG RESULTS");
  return failures == 0 ? 0 : 1;
}
