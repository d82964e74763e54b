// Backward: the gradients of a key block over ascending query rows, and those of query rows over ascending key blocks.
// Both recompute the probabilities from the log-sum-exp, so that each result has one writer and a fixed order of sums.
#include "attention/cpu_kernel.h"

namespace distca::attention {

namespace {

/// Scores of a tile and what becomes of them.
struct TileBuffers {
  float* scores;  // [tile rows, keys], then P
  float* dprobs;  // [tile rows, keys], then dS
  float* lse;     // [tile rows]
  float* delta;   // [tile rows]

  explicit TileBuffers(Carver& carver) {
    scores = carver.take(kQueryTileRows * kScoreColumns);
    dprobs = carver.take(kQueryTileRows * kScoreColumns);
    lse = carver.take(kQueryTileRows);
    delta = carver.take(kQueryTileRows);
  }
};

/// A key block with both of its transposes.
struct KeyBuffers {
  float* keys;               // [keys, columns]
  float* transposed_keys;    // [dim, keys]
  float* values;             // [keys, v_columns]
  float* transposed_values;  // [v_dim, keys]

  KeyBuffers(const KernelCall& call, Carver& carver) {
    keys = carver.take(kKeyBlockRows * call.columns);
    transposed_keys = carver.take(call.columns * kScoreColumns);
    values = carver.take(kKeyBlockRows * call.v_columns);
    transposed_values = carver.take(call.v_columns * kScoreColumns);
  }

  void load(const KernelCall& call, const KeyGroup& group, int64_t kv_head, int64_t begin, int64_t end) const {
    const HeadShape& heads = call.problem->heads;
    const int64_t padded = round_up(end - block_start(begin), kPackedColumns);
    load_key_block(call, group, group.k, kv_head, begin, end, heads.dim, keys, call.columns);
    load_key_block(call, group, group.v, kv_head, begin, end, heads.v_dim, values, call.v_columns);
    call.micro->transpose(padded, call.columns, keys, call.columns, transposed_keys, kScoreColumns);
    call.micro->transpose(padded, call.v_columns, values, call.v_columns, transposed_values, kScoreColumns);
  }
};

/// P and dS of `rows` query rows from `task_row` on against a loaded key block.
void compute_score_gradients(const KernelCall& call, const Task& task, int64_t head, int64_t task_row, int64_t rows,
                             VisibleKeys visible, const KeyBuffers& block, const float* q, const float* dout,
                             const TileBuffers& tile, float* prob_sum) {
  const HeadShape& heads = call.problem->heads;
  load_column(task.lse, task_row, head, rows, tile.lse);
  load_column(task.delta, task_row, head, rows, tile.delta);
  multiply_scores(call, rows, visible.limit, heads.dim, q, call.columns, block.transposed_keys, tile.scores);
  multiply_scores(call, rows, visible.limit, heads.v_dim, dout, call.v_columns, block.transposed_values, tile.dprobs);
  call.micro->softmax_gradient(rows, visible, call.problem->scale, tile.lse, tile.delta, tile.scores, tile.dprobs,
                               prob_sum);
}

// ---- dk and dv

struct KeyGradientBuffers {
  KeyBuffers block;
  TileBuffers tile;
  float* q;     // [tile rows, columns]
  float* dout;  // [tile rows, v_columns]
  float* dk;    // [keys, columns]
  float* dv;    // [keys, v_columns]

  KeyGradientBuffers(const KernelCall& call, Carver& carver) : block(call, carver), tile(carver) {
    q = carver.take(kQueryTileRows * call.columns);
    dout = carver.take(kQueryTileRows * call.v_columns);
    dk = carver.take(kKeyBlockRows * call.columns);
    dv = carver.take(kKeyBlockRows * call.v_columns);
  }
};

/// c [keys, columns] += weights^T [keys, rows] * b [rows, columns], each key over the rows that see it and no other.
void multiply_seeing(const KernelCall& call, int64_t rows, VisibleKeys visible, const float* weights, const float* b,
                     int64_t columns, float* c) {
  const auto multiply = [&](int64_t key, int64_t num_keys, int64_t row, int64_t num_rows) {
    call.micro->multiply_add(num_keys, columns, num_rows, {weights + row * kScoreColumns + key, 1, kScoreColumns},
                             b + row * columns, columns, c + key * columns, columns);
  };
  // Keys [whole_begin, whole_end) are seen by every row.
  const int64_t whole_end = std::clamp<int64_t>(visible.upto, 0, visible.limit);
  const int64_t whole_begin = std::clamp<int64_t>(rows - 1 + visible.from, 0, whole_end);
  const auto multiply_singly = [&](int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; ++key) {
      const int64_t first = std::max<int64_t>(key - visible.upto + 1, 0), last = std::min(key - visible.from + 1, rows);
      if (first < last) multiply(key, 1, first, last - first);
    }
  };
  multiply_singly(0, whole_begin);
  if (whole_begin < whole_end) multiply(whole_begin, whole_end - whole_begin, 0, rows);
  multiply_singly(whole_end, visible.limit);
}

void store_key_gradients(const KernelCall& call, const KeyGroup& group, const WorkItem& item, const float* dk,
                         const float* dv) {
  const HeadShape& heads = call.problem->heads;
  auto run = std::partition_point(group.grads.begin(), group.grads.end(),
                                  [&](const KeyGradRun& r) { return r.end <= item.begin; });
  for (; run != group.grads.end() && run->begin < item.end; ++run) {
    const int64_t begin = std::max(run->begin, item.begin);
    const int64_t rows = std::min(run->end, item.end) - begin;
    const int64_t row = begin - block_start(begin);
    call.micro->store_rows(run->dtype, rows, heads.dim, call.problem->scale, dk + row * call.columns, call.columns,
                           run->dk.at(begin - run->begin, item.kv_head), run->dk.row_stride);
    call.micro->store_rows(run->dtype, rows, heads.v_dim, 1.f, dv + row * call.v_columns, call.v_columns,
                           run->dv.at(begin - run->begin, item.kv_head), run->dv.row_stride);
  }
}

int64_t key_gradient_scratch(const KernelCall& call) {
  Carver carver(nullptr);
  KeyGradientBuffers(call, carver);
  return carver.used();
}

void work_on_key_gradients(const KernelCall& call, const WorkItem& item, float* scratch) {
  const HeadShape& heads = call.problem->heads;
  const MicroKernel& micro = *call.micro;
  const KeyGroup& group = call.problem->groups[item.index];
  const auto tasks = call.problem->tasks.subspan(group.task_begin, group.task_end - group.task_begin);
  Carver carver(scratch);
  const KeyGradientBuffers buffers(call, carver);
  std::fill_n(buffers.dk, kKeyBlockRows * call.columns, 0.f);
  std::fill_n(buffers.dv, kKeyBlockRows * call.v_columns, 0.f);

  const Mask& mask = call.problem->mask;
  const int64_t block = block_start(item.begin);
  const int64_t end_key = tasks.empty() ? 0 : std::min(item.end, mask.end_key(tasks.back().q_end - 1, group.kv_end));
  const bool is_seen = item.begin < end_key;
  if (is_seen) buffers.block.load(call, group, item.kv_head, item.begin, end_key);
  for (const Task& task : tasks) {
    if (!is_seen) break;
    const RowRange seeing = rows_seeing(mask, task, item.begin, end_key);
    for (int64_t h = 0; h < call.group_heads; ++h) {
      const int64_t head = item.kv_head * call.group_heads + h;
      for (int64_t row = seeing.begin; row < seeing.end; row += kQueryTileRows) {
        const int64_t rows = std::min(kQueryTileRows, seeing.end - row);
        const int64_t task_row = row - task.q_begin;
        const VisibleKeys visible = visible_keys(mask, row, block, end_key - block);
        micro.load_rows(heads.dtype, rows, heads.dim, task.q.at(task_row, head), task.q.row_stride, buffers.q,
                        call.columns);
        micro.load_rows(heads.dtype, rows, heads.v_dim, task.dout.at(task_row, head), task.dout.row_stride,
                        buffers.dout, call.v_columns);
        compute_score_gradients(call, task, head, task_row, rows, visible, buffers.block, buffers.q, buffers.dout,
                                buffers.tile, nullptr);
        multiply_seeing(call, rows, visible, buffers.tile.scores, buffers.dout, call.v_columns, buffers.dv);
        multiply_seeing(call, rows, visible, buffers.tile.dprobs, buffers.q, call.columns, buffers.dk);
      }
    }
  }
  store_key_gradients(call, group, item, buffers.dk, buffers.dv);
}

// ---- dq

struct QueryGradientBuffers {
  KeyBuffers block;
  TileBuffers tile;
  float* q;         // [heads, rows, columns]
  float* dout;      // [heads, rows, v_columns]
  float* dq;        // [heads, rows, columns]
  float* prob_sum;  // [heads, rows]

  QueryGradientBuffers(const KernelCall& call, Carver& carver) : block(call, carver), tile(carver) {
    const int64_t rows = call.group_heads * call.item_rows;
    q = carver.take(rows * call.columns);
    dout = carver.take(rows * call.v_columns);
    dq = carver.take(rows * call.columns);
    prob_sum = carver.take(rows);
  }
};

int64_t query_gradient_scratch(const KernelCall& call) {
  Carver carver(nullptr);
  QueryGradientBuffers(call, carver);
  return carver.used();
}

void work_on_query_gradients(const KernelCall& call, const WorkItem& item, float* scratch) {
  const HeadShape& heads = call.problem->heads;
  const MicroKernel& micro = *call.micro;
  const Task& task = call.problem->tasks[item.index];
  const KeyGroup& group = call.problem->groups[task.group];
  const int64_t rows = item.end - item.begin;
  const int64_t task_row = item.begin - task.q_begin;
  Carver carver(scratch);
  const QueryGradientBuffers buffers(call, carver);

  // All rows of dout are read before any of dq is written: they may be the same memory.
  for (int64_t h = 0; h < call.group_heads; ++h) {
    const int64_t head = item.kv_head * call.group_heads + h;
    micro.load_rows(heads.dtype, rows, heads.dim, task.q.at(task_row, head), task.q.row_stride,
                    buffers.q + h * rows * call.columns, call.columns);
    micro.load_rows(heads.dtype, rows, heads.v_dim, task.dout.at(task_row, head), task.dout.row_stride,
                    buffers.dout + h * rows * call.v_columns, call.v_columns);
  }
  std::fill_n(buffers.dq, call.group_heads * rows * call.columns, 0.f);
  std::fill_n(buffers.prob_sum, call.group_heads * rows, 0.f);

  const Mask& mask = call.problem->mask;
  const int64_t end_key = mask.end_key(item.end - 1, group.kv_end);
  for (int64_t begin = mask.first_key(item.begin); begin < end_key;) {
    const int64_t block = block_start(begin);
    const int64_t end = std::min(block + kKeyBlockRows, end_key);
    buffers.block.load(call, group, item.kv_head, begin, end);
    for (int64_t h = 0; h < call.group_heads; ++h) {
      for (int64_t i = first_seeing(mask, item, begin); i < rows; i += kQueryTileRows) {
        const int64_t tile = std::min(kQueryTileRows, rows - i);
        const int64_t at = h * rows + i;
        const VisibleKeys visible = visible_keys(mask, item.begin + i, block, end - block);
        compute_score_gradients(call, task, item.kv_head * call.group_heads + h, task_row + i, tile, visible,
                                buffers.block, buffers.q + at * call.columns, buffers.dout + at * call.v_columns,
                                buffers.tile, buffers.prob_sum + at);
        multiply_visible(call, tile, visible, buffers.tile.dprobs, buffers.block.keys, call.columns,
                         buffers.dq + at * call.columns);
      }
    }
    begin = end;
  }

  // The probabilities of a row sum to one but for the rounding of its log-sum-exp, the largest error in them: divide it
  // out.
  micro.divide_rows(call.group_heads * rows, call.columns, buffers.prob_sum, buffers.dq);
  for (int64_t h = 0; h < call.group_heads; ++h)
    micro.store_rows(heads.dtype, rows, heads.dim, call.problem->scale, buffers.dq + h * rows * call.columns,
                     call.columns, task.dq.at(task_row, item.kv_head * call.group_heads + h), task.dq.row_stride);
}

}  // namespace

const Pass kKeyGradientPass = {key_gradient_scratch, work_on_key_gradients};
const Pass kQueryGradientPass = {query_gradient_scratch, work_on_query_gradients};

}  // namespace distca::attention
