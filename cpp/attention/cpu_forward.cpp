// Forward: the online softmax of some query rows over ascending key blocks.
#include <cmath>
#include <limits>

#include "attention/cpu_kernel.h"

namespace distca::attention {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Buffers {
  float* keys;             // [keys, columns]
  float* transposed_keys;  // [dim, keys]
  float* values;           // [keys, v_columns]
  float* scores;           // [tile rows, keys]
  float* q;                // [heads, rows, columns]
  float* out;              // [heads, rows, v_columns]
  float* row_max;          // [heads, rows]
  float* row_sum;          // [heads, rows]

  Buffers(const KernelCall& call, Carver& carver) {
    const int64_t rows = call.group_heads * call.item_rows;
    keys = carver.take(kKeyBlockRows * call.columns);
    transposed_keys = carver.take(call.columns * kScoreColumns);
    values = carver.take(kKeyBlockRows * call.v_columns);
    scores = carver.take(kQueryTileRows * kScoreColumns);
    q = carver.take(rows * call.columns);
    out = carver.take(rows * call.v_columns);
    row_max = carver.take(rows);
    row_sum = carver.take(rows);
  }
};

int64_t scratch_floats(const KernelCall& call) {
  Carver carver(nullptr);
  Buffers(call, carver);
  return carver.used();
}

void work(const KernelCall& call, const WorkItem& item, float* scratch) {
  const HeadShape& heads = call.problem->heads;
  const MicroKernel& micro = *call.micro;
  const Task& task = call.problem->tasks[item.index];
  const KeyGroup& group = call.problem->groups[task.group];
  const int64_t rows = item.end - item.begin;
  const int64_t task_row = item.begin - task.q_begin;
  Carver carver(scratch);
  const Buffers buffers(call, carver);

  // All rows of q are read before any of out is written: they may be the same memory.
  for (int64_t h = 0; h < call.group_heads; ++h)
    micro.load_rows(heads.dtype, rows, heads.dim, task.q.at(task_row, item.kv_head * call.group_heads + h),
                    task.q.row_stride, buffers.q + h * rows * call.columns, call.columns);
  std::fill_n(buffers.out, call.group_heads * rows * call.v_columns, 0.f);
  std::fill_n(buffers.row_max, call.group_heads * rows, -kInfinity);
  std::fill_n(buffers.row_sum, call.group_heads * rows, 0.f);

  const Mask& mask = call.problem->mask;
  const int64_t end_key = mask.end_key(item.end - 1, group.kv_end);
  for (int64_t begin = mask.first_key(item.begin); begin < end_key;) {
    const int64_t block = block_start(begin);
    const int64_t end = std::min(block + kKeyBlockRows, end_key);
    const int64_t num_keys = end - block;
    load_key_block(call, group, group.k, item.kv_head, begin, end, heads.dim, buffers.keys, call.columns);
    micro.transpose(round_up(num_keys, kPackedColumns), call.columns, buffers.keys, call.columns,
                    buffers.transposed_keys, kScoreColumns);
    load_key_block(call, group, group.v, item.kv_head, begin, end, heads.v_dim, buffers.values, call.v_columns);
    for (int64_t h = 0; h < call.group_heads; ++h) {
      for (int64_t i = first_seeing(mask, item, begin); i < rows; i += kQueryTileRows) {
        const int64_t tile = std::min(kQueryTileRows, rows - i);
        const int64_t at = h * rows + i;
        const VisibleKeys visible = visible_keys(mask, item.begin + i, block, num_keys);
        float* out = buffers.out + at * call.v_columns;
        multiply_scores(call, tile, num_keys, heads.dim, buffers.q + at * call.columns, call.columns,
                        buffers.transposed_keys, buffers.scores);
        micro.softmax_step(tile, visible, call.problem->scale, buffers.scores, buffers.row_max + at,
                           buffers.row_sum + at, out, call.v_columns);
        multiply_visible(call, tile, visible, buffers.scores, buffers.values, call.v_columns, out);
      }
    }
    begin = end;
  }

  for (int64_t h = 0; h < call.group_heads; ++h) {
    const int64_t head = item.kv_head * call.group_heads + h;
    float* out = buffers.out + h * rows * call.v_columns;
    micro.divide_rows(rows, call.v_columns, buffers.row_sum + h * rows, out);
    micro.store_rows(heads.dtype, rows, heads.v_dim, 1.f, out, call.v_columns, task.out.at(task_row, head),
                     task.out.row_stride);
    for (int64_t i = 0; i < rows; ++i) {
      const float sum = buffers.row_sum[h * rows + i];
      const float lse = sum == 0.f ? -kInfinity : buffers.row_max[h * rows + i] + std::log(sum);
      std::memcpy(task.lse.at(task_row + i, head), &lse, sizeof(lse));
    }
  }
}

}  // namespace

const Pass kForwardPass = {scratch_floats, work};

}  // namespace distca::attention
