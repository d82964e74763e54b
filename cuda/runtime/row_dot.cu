#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "runtime/check.h"
#include "runtime/row_dot.h"

namespace distca::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 132 * 16;

__device__ std::byte* address(const RowView& view, int64_t row, int head) {
  return view.data + row * view.row_stride + head * view.head_stride;
}

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float as_float(__half x) { return __half2float(x); }

/// Each row and head takes a warp. Lane i adds elements i, i + 32, ..., and then the lanes are added in halves.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    row_dot_kernel(int64_t num_rows, int num_heads, int dim, RowView out, RowView dout, RowView delta) {
  const int lane = threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y, count = num_rows * num_heads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; i < count; i += step) {
    const int64_t row = i / num_heads;
    const int head = static_cast<int>(i % num_heads);
    const auto* a = reinterpret_cast<const Element*>(address(out, row, head));
    const auto* b = reinterpret_cast<const Element*>(address(dout, row, head));
    float sum = 0.f;
    for (int d = lane; d < dim; d += 32) sum = __fmaf_rn(as_float(a[d]), as_float(b[d]), sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) *reinterpret_cast<float*>(address(delta, row, head)) = sum;
  }
}

template <class Element>
void launch_row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout,
                    const RowView& delta, cudaStream_t stream) {
  const dim3 threads(32, kThreads / 32);
  const int64_t blocks = std::min<int64_t>(kMaxBlocks, (num_rows * heads.q_heads + threads.y - 1) / threads.y);
  row_dot_kernel<Element><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(
      num_rows, static_cast<int>(heads.q_heads), static_cast<int>(heads.v_dim), out, dout, delta);
  check(cudaGetLastError(), "the kernel of row sums");
}

}  // namespace

void row_dot(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& dout, const RowView& delta,
             cudaStream_t stream) {
  if (num_rows == 0) return;
  switch (heads.dtype) {
    case DType::kFloat32:
      return launch_row_dot<float>(heads, num_rows, out, dout, delta, stream);
    case DType::kBFloat16:
      return launch_row_dot<__nv_bfloat16>(heads, num_rows, out, dout, delta, stream);
    case DType::kFloat16:
      return launch_row_dot<__half>(heads, num_rows, out, dout, delta, stream);
  }
}

void load_row_dot_kernels() {
  load_kernel(row_dot_kernel<float>);
  load_kernel(row_dot_kernel<__nv_bfloat16>);
  load_kernel(row_dot_kernel<__half>);
}

}  // namespace distca::cuda
