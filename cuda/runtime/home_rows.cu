#include <algorithm>

#include "runtime/check.h"
#include "runtime/elements.h"
#include "runtime/home_rows.h"

namespace distca::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 132 * 16;

__device__ std::byte* address(const RowView& view, int64_t row, int head) {
  return view.data + row * view.row_stride + head * view.head_stride;
}

/// Each row and head takes a warp. Lane i adds elements i, i + 32, ..., and then the lanes are added in halves.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    row_delta_kernel(int64_t num_rows, int num_heads, int dim, attention::DeltaRows rows) {
  const int lane = threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y, count = num_rows * num_heads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < count; i += step) {
    const int64_t row = i / num_heads;
    const int head = static_cast<int>(i % num_heads);
    const auto* a = reinterpret_cast<const Element*>(address(rows.out, row, head));
    const auto* b = reinterpret_cast<const Element*>(address(rows.dout, row, head));
    float sum = 0.f;
    for (int d = lane; d < dim; d += 32) sum = __fmaf_rn(as_float(a[d]), as_float(b[d]), sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane != 0) continue;
    if (rows.dlse.data != nullptr) sum -= *reinterpret_cast<const float*>(address(rows.dlse, row, head));
    *reinterpret_cast<float*>(address(rows.delta, row, head)) = sum;
  }
}

/// Each row and head takes a warp.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    add_sinks_kernel(int64_t num_rows, int num_heads, int dim, RowView out, RowView lse, const float* sinks) {
  const int lane = threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y, count = num_rows * num_heads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < count; i += step) {
    const int64_t row = i / num_heads;
    const int head = static_cast<int>(i % num_heads);
    auto* const sum = reinterpret_cast<float*>(address(lse, row, head));
    const float without = *sum, sink = sinks[head];
    if (without == -INFINITY) continue;
    const float factor = 1.f / (1.f + expf(sink - without));
    auto* const x = reinterpret_cast<Element*>(address(out, row, head));
    for (int d = lane; d < dim; d += 32) store(x + d, as_float(x[d]) * factor);
    __syncwarp();  // every lane has read the sum
    const float base = fmaxf(without, sink);
    if (lane == 0) *sum = base + logf(expf(without - base) + expf(sink - base));
  }
}

/// Each value takes a thread.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const uint64_t* num_terms, const float* const* terms, int64_t n, float* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float largest = terms[0][i];
  for (uint64_t j = 1; j < *num_terms; ++j) {
    const float term = terms[j][i];
    if (!(term <= largest) && largest == largest) largest = term;
  }
  to[i] = largest;
}

struct Grid {
  dim3 blocks, threads;
};
/// A warp for each row and head, as long as there are blocks.
Grid grid_of(const HeadShape& heads, int64_t num_rows) {
  const dim3 threads(32, kThreads / 32);
  const int64_t blocks = std::min<int64_t>(kMaxBlocks, (num_rows * heads.q_heads + threads.y - 1) / threads.y);
  return {dim3(static_cast<unsigned>(blocks)), threads};
}

template <class Element>
void launch_row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, cudaStream_t stream) {
  const Grid grid = grid_of(heads, num_rows);
  row_delta_kernel<Element><<<grid.blocks, grid.threads, 0, stream>>>(num_rows, static_cast<int>(heads.q_heads),
                                                                      static_cast<int>(heads.v_dim), rows);
  check(cudaGetLastError(), "the kernel of delta");
}

template <class Element>
void launch_add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse,
                      const float* sinks, cudaStream_t stream) {
  const Grid grid = grid_of(heads, num_rows);
  add_sinks_kernel<Element><<<grid.blocks, grid.threads, 0, stream>>>(num_rows, static_cast<int>(heads.q_heads),
                                                                      static_cast<int>(heads.v_dim), out, lse, sinks);
  check(cudaGetLastError(), "the kernel that adds sinks");
}

}  // namespace

void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, cudaStream_t stream) {
  if (num_rows == 0) return;
  switch (heads.dtype) {
    case DType::kFloat32:
      return launch_row_delta<float>(heads, num_rows, rows, stream);
    case DType::kBFloat16:
      return launch_row_delta<__nv_bfloat16>(heads, num_rows, rows, stream);
    case DType::kFloat16:
      return launch_row_delta<__half>(heads, num_rows, rows, stream);
  }
}

void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
               cudaStream_t stream) {
  if (num_rows == 0) return;
  switch (heads.dtype) {
    case DType::kFloat32:
      return launch_add_sinks<float>(heads, num_rows, out, lse, sinks, stream);
    case DType::kBFloat16:
      return launch_add_sinks<__nv_bfloat16>(heads, num_rows, out, lse, sinks, stream);
    case DType::kFloat16:
      return launch_add_sinks<__half>(heads, num_rows, out, lse, sinks, stream);
  }
}

void largest(const DeviceTable& table, size_t part, int64_t n, float* to, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  largest_kernel<<<blocks, kThreads, 0, stream>>>(table.counts() + part, table.part<const float* const>(part), n, to);
  check(cudaGetLastError(), "the kernel that finds the largest scores");
}

void load_home_row_kernels() {
  load_kernel(largest_kernel);
  load_kernel(row_delta_kernel<float>);
  load_kernel(row_delta_kernel<__nv_bfloat16>);
  load_kernel(row_delta_kernel<__half>);
  load_kernel(add_sinks_kernel<float>);
  load_kernel(add_sinks_kernel<__nv_bfloat16>);
  load_kernel(add_sinks_kernel<__half>);
}

}  // namespace distca::cuda
