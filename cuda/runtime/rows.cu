#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "runtime/check.h"
#include "runtime/rows.h"

namespace distca::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 132 * 16;

__device__ std::byte* address(const RowView& view, int64_t row, int head) {
  return view.data + row * view.row_stride + head * view.head_stride;
}

/// Calls body(row, head, piece) for every piece of every head of every row: threads side by side take pieces side by
/// side.
template <class Body>
__global__ void __launch_bounds__(kThreads) for_each_piece(int64_t num_rows, int num_heads, int pieces, Body body) {
  const int per_row = num_heads * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < num_rows; row += step)
    for (int i = threadIdx.x; i < per_row; i += blockDim.x) body(row, i / pieces, i % pieces);
}

/// Pieces of `piece_bytes` of rows of that extent.
template <class Body>
void launch(const RowExtent& n, int64_t piece_bytes, cudaStream_t stream, const Body& body) {
  const auto heads = static_cast<int>(n.num_heads), pieces = static_cast<int>(n.head_bytes / piece_bytes);
  if (n.num_rows == 0 || heads * pieces == 0) return;
  unsigned x = 32;
  while (x < kThreads && x < static_cast<unsigned>(heads * pieces)) x *= 2;
  const dim3 threads(x, kThreads / x);
  const int64_t blocks = std::min<int64_t>(kMaxBlocks, (n.num_rows + threads.y - 1) / threads.y);
  for_each_piece<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(n.num_rows, heads, pieces, body);
  check(cudaGetLastError(), "a kernel over rows");
}

/// The largest power of two up to `most` that divides all sizes and addresses of the views.
int64_t alignment(std::initializer_list<RowView> views, const RowExtent& n, int64_t most) {
  int64_t bits = most | n.head_bytes;
  for (const RowView& v : views) {
    bits |= static_cast<int64_t>(reinterpret_cast<uintptr_t>(v.data)) | v.head_stride;
    if (n.num_rows > 1) bits |= v.row_stride;
  }
  return bits & -bits;
}

template <class Word>
void copy_words(const RowView& to, const RowView& from, const RowExtent& n, cudaStream_t stream) {
  launch(n, sizeof(Word), stream, [=] __device__(int64_t row, int head, int piece) {
    reinterpret_cast<Word*>(address(to, row, head))[piece] =
        reinterpret_cast<const Word*>(address(from, row, head))[piece];
  });
}

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float as_float(__half x) { return __half2float(x); }

/// A warp for each row and head: lane i takes elements i, i + 32, ..., then the lanes are added in halves.
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

void copy_rows(const RowView& to, const RowView& from, const RowExtent& n, cudaStream_t stream) {
  switch (alignment({to, from}, n, 16)) {
    case 16:
      return copy_words<uint4>(to, from, n, stream);
    case 8:
      return copy_words<uint2>(to, from, n, stream);
    case 4:
      return copy_words<uint32_t>(to, from, n, stream);
    default:
      return copy_words<uint16_t>(to, from, n, stream);
  }
}

void fill_rows(const RowView& rows, const RowExtent& n, uint32_t word, cudaStream_t stream) {
  launch(n, sizeof(uint32_t), stream, [=] __device__(int64_t row, int head, int piece) {
    // In halves: rows of 16-bit elements need not be aligned to 4 bytes.
    auto* to = reinterpret_cast<uint16_t*>(address(rows, row, head)) + 2 * piece;
    to[0] = static_cast<uint16_t>(word);
    to[1] = static_cast<uint16_t>(word >> 16);
  });
}

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

}  // namespace distca::cuda
