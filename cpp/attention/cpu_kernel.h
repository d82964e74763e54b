// What the passes of the CPU kernel share: a pass is a list of independent work items, handed out longest first to
// workers that have scratch memory of their own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "attention/attention.h"
#include "attention/micro_kernel.h"

namespace distca::attention {

/// Rows of a query tile.
inline constexpr int64_t kQueryTileRows = 64;

static_assert(kScoreColumns == kKeyBlockRows);

inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// What a worker needs to know about the problem.
struct KernelCall {
  const Problem* problem = nullptr;
  const MicroKernel* micro = nullptr;
  int64_t group_heads = 0;  // query heads that share a key/value head
  int64_t columns = 0;      // packed width of q, k, dq, dk
  int64_t v_columns = 0;    // packed width of v, out, dout, dv
  int64_t item_rows = 0;    // most rows of a work item over query rows

  KernelCall() = default;
  KernelCall(const Problem& p, const MicroKernel& m)
      : problem(&p),
        micro(&m),
        group_heads(p.heads.q_heads / p.heads.kv_heads),
        columns(round_up(p.heads.dim, kPackedColumns)),
        v_columns(round_up(p.heads.v_dim, kPackedColumns)),
        // Packing a key block is shared by item_rows * group_heads rows; more would leave the second cache.
        item_rows(std::clamp<int64_t>(2 * kQueryTileRows / group_heads, 16, 2 * kQueryTileRows)) {}
};

/// Rows [begin, end) of a document for one key/value head of a group and the query heads that share it: query rows of
/// the task `index`, or key rows of the group `index`.
struct WorkItem {
  int64_t cost;
  int64_t index;
  int64_t kv_head;
  int64_t begin;
  int64_t end;
};

/// Carves arrays out of a worker's scratch memory; from a null base it only counts.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}
  float* take(int64_t floats) {
    float* result = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(floats, 16);
    return result;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

/// A pass: how much scratch an item needs at most, and the work.
struct Pass {
  int64_t (*scratch_floats)(const KernelCall&);
  void (*work)(const KernelCall&, const WorkItem&, float* scratch);
};

extern const Pass kForwardPass;        // out and lse; items are query rows
extern const Pass kKeyGradientPass;    // dk and dv; items are key blocks
extern const Pass kQueryGradientPass;  // dq; items are query rows

/// The first row of the key block that `row` is in.
inline int64_t block_start(int64_t row) { return row / kKeyBlockRows * kKeyBlockRows; }

/// The keys or values of document rows [begin, end), all of one key block, to fp32: row r to row r - block_start of
/// dst. Rows before `begin`, and after `end` up to the next multiple of kPackedColumns, become zero; they are not read.
inline void load_key_block(const KernelCall& call, const KeyGroup& group, const RowView (&views)[2], int64_t kv_head,
                           int64_t begin, int64_t end, int64_t dim, float* dst, int64_t dst_stride) {
  const int64_t entry = group.blocks[static_cast<size_t>(begin / kKeyBlockRows - group.first_block)];
  const RowView& view = views[entry & 1];
  const int64_t skipped = begin - block_start(begin), rows = end - block_start(begin);
  const auto clear = [&](int64_t from, int64_t to) {
    std::memset(dst + from * dst_stride, 0, static_cast<size_t>((to - from) * dst_stride) * sizeof(float));
  };
  clear(0, skipped);
  call.micro->load_rows(call.problem->heads.dtype, rows - skipped, dim, view.at((entry >> 1) + skipped, kv_head),
                        view.row_stride, dst + skipped * dst_stride, dst_stride);
  clear(rows, round_up(rows, kPackedColumns));
}

/// What query rows from `row` on see of the keys [block, block + limit).
inline VisibleKeys visible_keys(const Mask& mask, int64_t row, int64_t block, int64_t limit) {
  constexpr int64_t kFar = int64_t{1} << 40;  // beyond any row
  return {mask.window > 0 ? row - mask.window + 1 - block : -kFar,
          mask.kind == MaskKind::kFull ? kFar : row + 1 - block, limit};
}

struct RowRange {
  int64_t begin;
  int64_t end;
};

/// The task's query rows that may see any of the keys [begin, end).
inline RowRange rows_seeing(const Mask& mask, const Task& task, int64_t begin, int64_t end) {
  if (mask.kind == MaskKind::kFull) return {task.q_begin, task.q_end};
  const int64_t last = mask.window > 0 ? std::min(task.q_end, end - 1 + mask.window) : task.q_end;
  return {std::max(task.q_begin, begin), last};
}

/// The first of the item's query rows that may see keys from `begin` on, counted from the item's own begin.
inline int64_t first_seeing(const Mask& mask, const WorkItem& item, int64_t begin) {
  return mask.kind == MaskKind::kFull ? 0 : std::max<int64_t>(begin - item.begin, 0);
}

/// `rows` values of one head of a [rows, heads, 1] fp32 view.
inline void load_column(const RowView& view, int64_t row, int64_t head, int64_t rows, float* dst) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(dst + i, view.at(row + i, head), sizeof(float));
}

/// scores [rows, kScoreColumns] = a [rows, dim] * transposed [dim, keys], for the first num_keys keys.
inline void multiply_scores(const KernelCall& call, int64_t rows, int64_t num_keys, int64_t dim, const float* a,
                            int64_t a_stride, const float* transposed, float* scores) {
  std::memset(scores, 0, static_cast<size_t>(rows * kScoreColumns) * sizeof(float));
  call.micro->multiply_add(rows, round_up(num_keys, kPackedColumns), dim, {a, a_stride, 1}, transposed, kScoreColumns,
                           scores, kScoreColumns);
}

/// c [rows, columns] += weights [rows, keys] * b [keys, columns], each row over the keys that it sees and no other.
inline void multiply_visible(const KernelCall& call, int64_t rows, VisibleKeys visible, const float* weights,
                             const float* b, int64_t columns, float* c) {
  const auto multiply = [&](int64_t row, int64_t num_rows, int64_t key, int64_t num_keys) {
    call.micro->multiply_add(num_rows, columns, num_keys, {weights + row * kScoreColumns + key, kScoreColumns, 1},
                             b + key * columns, columns, c + row * columns, columns);
  };
  // Rows [whole_begin, whole_end) see all keys of the block.
  const int64_t whole_begin = std::clamp<int64_t>(visible.limit - visible.upto, 0, rows);
  const int64_t whole_end = std::clamp<int64_t>(1 - visible.from, whole_begin, rows);
  const auto multiply_singly = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = std::max<int64_t>(visible.from + i, 0), last = std::min(visible.upto + i, visible.limit);
      if (first < last) multiply(i, 1, first, last - first);
    }
  };
  multiply_singly(0, whole_begin);
  if (whole_begin < whole_end) multiply(whole_begin, whole_end - whole_begin, 0, visible.limit);
  multiply_singly(whole_end, rows);
}

}  // namespace distca::attention
