// The common parts of the kernels for compute capability 8.0 and later, forward and backward. A CTA stays and takes one
// item of the work list after another. All its warps load and compute: while they compute on one stage of shared
// memory, copies fill the other one.
#pragma once

#include "attention/ampere.h"
#include "attention/row_parts.h"
#include "attention/tables.h"

namespace distca::attention::cuda {

/// Bytes of shared memory that a CTA can have on every GPU of compute capability 8.0 and later (8.6, 8.9 and 12.0 have
/// the least).
inline constexpr int kLeastSharedMemory = 99 * 1024;
/// Elements of 16 bytes, of a row of a chunk, and of the inner dimension of one product.
inline constexpr int kPieceColumns = 8, kChunkColumns = 64, kStepColumns = 16;
inline constexpr int kPieceBytes = 16, kChunkRowBytes = 128;

/// A tile of 16-bit elements. Columns come in chunks of 64. The 16-byte piece p of row r lies at p ^ (r % 8), so that
/// eight rows of a matrix lie in different banks.
template <int kChunks, int kRows>
using WarpTile = uint16_t[kChunks][kRows][kChunkColumns];

/// The rows that a lane names where a warp loads 16 x 16 elements, as four matrices. kRowsFirst: the second matrix has
/// the rows after the first one's. kColumnsFirst: it has the columns after them.
enum class Matrices { kRowsFirst, kColumnsFirst };

/// Where this lane's row of elements [row, row + 16) x [0, 16) is. `row` is a multiple of 8. Other columns of the chunk
/// are at this place ^ (their first column * 2).
template <Matrices kOrder>
DISTCA_DEVICE ampere::Place matrices_at(const void* tile, int row) {
  const int lane = lane_of_warp(), low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  const int down = kOrder == Matrices::kRowsFirst ? second : third;
  const int right = kOrder == Matrices::kRowsFirst ? third : second;
  return ampere::place_of(tile) + ((row + low + 8 * down) * kChunkRowBytes + (right ^ low) * kPieceBytes);
}

/// sums += A B^T, for kTiles times 16 rows of A and kColumnsB rows of B, over kInner columns of both. The tiles have
/// kRowsA and kRowsB rows a chunk. `a` and `b` are their first matrices: A's with kRowsFirst, B's with kColumnsFirst.
template <class Element, int kInner, int kRowsA, int kRowsB, int kColumnsB, int kTiles>
DISTCA_DEVICE void multiply_transposed(float (&sums)[kTiles][kColumnsB / 2], ampere::Place a, ampere::Place b) {
  uint32_t left[kTiles][4], right[4];
#pragma unroll
  for (int k = 0; k < kInner / kStepColumns; ++k) {
    const int chunk = k / 4, column = k % 4 * kStepColumns * 2;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      ampere::load_matrices(left[m], (a + (chunk * kRowsA + 16 * m) * kChunkRowBytes) ^ column);
#pragma unroll
    for (int n = 0; n < kColumnsB / 16; ++n) {
      ampere::load_matrices(right, (b + (chunk * kRowsB + 16 * n) * kChunkRowBytes) ^ column);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        ampere::multiply<Element>(sums[m], n, 0, left[m], right);
        ampere::multiply<Element>(sums[m], n, 1, left[m], right);
      }
    }
  }
  ampere::end_products();
}

/// sums += A B, for one step of 16 rows of B, of which there are kColumnsB columns. B's tile has kRowsB rows a chunk;
/// `b` are its first matrices of the step, with kRowsFirst.
template <class Element, int kRowsB, int kColumnsB, int kTiles>
DISTCA_DEVICE void multiply_step(float (&sums)[kTiles][kColumnsB / 2], const uint32_t (&a)[kTiles][4],
                                 ampere::Place b) {
  uint32_t right[4];
#pragma unroll
  for (int n = 0; n < kColumnsB / 16; ++n) {
    ampere::load_transposed(right, (b + n / 4 * kRowsB * kChunkRowBytes) ^ (n % 4 * kStepColumns * 2));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      ampere::multiply<Element>(sums[m], n, 0, a[m], right);
      ampere::multiply<Element>(sums[m], n, 1, a[m], right);
    }
  }
  ampere::end_products();
}

/// The next item; num_items at the end. All threads of the CTA call it. Thread 0 takes it and calls begin(item), while
/// others may still be at the item before.
template <class Begin>
DISTCA_DEVICE int take_item(const KernelParams& p, int* shared_index, const Begin& begin) {
  if (gpu::thread_of_cta() == 0) {
    const int index = minimum(gpu::fetch_add(p.next_item, 1), p.num_items());
    if (index < p.num_items()) begin(p.items[index]);
    *shared_index = index;
  }
  gpu::sync_cta();
  return *shared_index;
}

/// Waits until all rows of the item's tasks have come. All threads of the CTA call it.
DISTCA_DEVICE void await_signals(const KernelParams& p, const WorkItem& item, int num_threads) {
  if (item.remote == 0) return;
  for (int t = item.task + gpu::thread_of_cta(); t < item.task_end; t += num_threads) {
    const Signal signal = p.tasks[t].signal;
    if (signal.word != nullptr) gpu::await_signal(signal.word, signal.value);
  }
  gpu::sync_cta();
}

/// Rows of one head in memory, as far as loads need to know.
struct HeadRows {
  const std::byte* data;
  int64_t row_stride;
};

/// The rows of a map of keys, which is what the copy engine would be told (not a CUtensorMap here).
DISTCA_DEVICE const MapSpec& map_of(const KernelParams& p, int index) {
  static_assert(sizeof(MapSpec) <= sizeof(TensorMap));
  return *reinterpret_cast<const MapSpec*>(p.maps + index);
}
DISTCA_DEVICE HeadRows keys_of(const KernelParams& p, int map, int kv_head) {
  const MapSpec& spec = map_of(p, map);
  return {spec.data + kv_head * spec.strides[1], spec.strides[0]};
}

/// Token and head of each row of a tile: row r is head r % group_heads of token r / group_heads.
struct TileRow {
  int16_t token;
  int16_t head;
};
template <int kRows>
DISTCA_DEVICE void number_rows(const KernelParams& p, TileRow (&rows)[kRows], int num_threads) {
  for (int row = gpu::thread_of_cta(); row < kRows; row += num_threads)
    rows[row] = {static_cast<int16_t>(row / p.group_heads), static_cast<int16_t>(row % p.group_heads)};
}

/// Starts copying a tile's rows of queries, or of gradients of out, of `dim` columns. Rows past its tokens become zero,
/// and so do columns past `dim`.
template <int kChunks, int kRows, int kThreads>
DISTCA_DEVICE void copy_queries(const MapSpec& map, int first_head, int first_token, int num_tokens, int dim,
                                const TileRow (&rows)[kRows], WarpTile<kChunks, kRows>& tile) {
  constexpr int kTogether = kThreads / kPieceColumns;  // rows that the threads copy at a time
  static_assert(kTogether % 8 == 0 && (kRows % kTogether == 0 || kTogether % kRows == 0));
  const int piece = gpu::thread_of_cta() % kPieceColumns, first = gpu::thread_of_cta() / kPieceColumns;
  // Read once: the compiler must take it that a copy changes them.
  const int64_t head_stride = map.strides[0], token_stride = map.strides[1];
  const std::byte* const data = map.data + first_token * token_stride + first_head * head_stride + piece * kPieceBytes;
  const ampere::Place to = ampere::place_of(tile) + (piece ^ first % 8) * kPieceBytes;
#pragma unroll 1
  for (int i = 0; i < ceil_div(kRows, kTogether); ++i) {
    const int row = first + i * kTogether;
    if (row >= kRows) break;
    const TileRow at = rows[row];
    const bool is_there = at.token < num_tokens;
    const std::byte* const from = is_there ? data + at.token * token_stride + at.head * head_stride : data;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      ampere::copy16(to + (chunk * kRows + row) * kChunkRowBytes, from + chunk * kChunkRowBytes,
                     is_there && chunk * kChunkColumns + piece * kPieceColumns < dim);
  }
}

/// Starts copying chunks [first_chunk, first_chunk + kChunks) of keys or values with `dim` columns: kRows rows, of
/// which the first one is row `row` of `source`. Rows outside [needed.begin, needed.end), counted from the first one,
/// become zero and are not read.
template <int kChunks, int kRows, int kThreads>
DISTCA_DEVICE void copy_keys(const HeadRows& source, int64_t row, RowRange needed, int first_chunk, int dim,
                             WarpTile<kChunks, kRows>& tile) {
  constexpr int kTogether = kThreads / kPieceColumns;
  static_assert(kTogether % 8 == 0 && (kRows % kTogether == 0 || kTogether % kRows == 0));
  const int piece = gpu::thread_of_cta() % kPieceColumns, first = gpu::thread_of_cta() / kPieceColumns;
  const int column = first_chunk * kChunkColumns + piece * kPieceColumns;
  const int64_t stride = source.row_stride;
  const std::byte* from = source.data + (row + first) * stride + int64_t{column} * 2;
  const ampere::Place to = ampere::place_of(tile) + (piece ^ first % 8) * kPieceBytes;
#pragma unroll 1
  for (int i = 0; i < ceil_div(kRows, kTogether); ++i, from += kTogether * stride) {
    const int at = first + i * kTogether;
    if (at >= kRows) break;
    const bool is_needed = at >= needed.begin && at < needed.end;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      ampere::copy16(to + (chunk * kRows + at) * kChunkRowBytes, from + chunk * kChunkRowBytes,
                     is_needed && column + chunk * kChunkColumns < dim);
  }
}

/// The entry of a group's block table for document row `row`, and where that row lies by it.
DISTCA_DEVICE int64_t entry_of_keys(const KernelParams& p, const GroupEntry& group, int row) {
  return p.blocks[group.blocks + row / kTableRows - group.first_block];
}
DISTCA_DEVICE BlockPlace place_of_keys(int64_t entry, int row) {
  return {static_cast<int>(entry >> 1) + row % kTableRows, static_cast<int>(entry & 1)};
}

}  // namespace distca::attention::cuda
