// Backward, in one pass over the pairs of query rows and keys. A work item is a chunk of keys of a unit. It goes over
// the query rows that see it, and adds to dk and dv, which it owns, and to dq, which it shares with the other chunks.
//
// dq is summed up in the batch's memory. Chunks add to each strip of query rows in ascending order: a chunk waits until
// the one before it is done with the strip. No circle of waits is possible. Items of a unit are handed out in ascending
// order, and therefore the item that is waited for is at work in another worker, and itself waits only for earlier
// ones. A last pass stores dq, which may lie over dout.
#include <cmath>
#include <limits>
#include <thread>

#include "attention/cpu_kernel.h"

namespace distca::attention {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Query rows that go through a chunk together. They are a few tiles.
constexpr int64_t kStripRows = 2 * kTileRows;

int64_t strips_of(const Task& task) { return ceil_div(task.q_end - task.q_begin, kStripRows); }

int64_t strips_of(const KernelCall& call, const KeyGroup& group) {
  int64_t strips = 0;
  for (int64_t t = group.task_begin; t < group.task_end; ++t)
    strips += strips_of(call.problem->tasks[static_cast<size_t>(t)]);
  return strips;
}

/// The running dq of one strip and head of a unit: for each tile, sums [kTileRows, columns]. It is a part of the
/// batch's memory.
int64_t strip_floats(const KernelCall& call) { return kStripRows * panels_of(call.columns) * kPanelWords; }
float* strip_dq(const KernelCall& call, const Unit& unit, int64_t strip, int64_t h) {
  return call.memory + unit.offset + (strip * call.group_heads + h) * strip_floats(call);
}
/// The sums of the tile whose first row in the strip is `row`.
float* tile_dq(const KernelCall& call, float* strip, int64_t row) {
  return strip + row * panels_of(call.columns) * kPanelWords;
}

/// Keys and values of a chunk, packed in each way that a product needs them, and their gradients.
struct ChunkBuffers {
  Panels keys;    // [keys, words]
  Panels summed;  // [keys, columns]: keys as values, from pack_values
  Panels values;  // [keys, v_words]
  Panels dk;      // [keys, columns]
  Panels dv;      // [keys, v_columns]

  ChunkBuffers(const KernelCall& call, FloatCarver& carver) {
    keys = carver.take_panels(kChunkKeys, call.words);
    summed = call.micro->word_elements == 1 ? keys : carver.take_panels(kChunkKeys / 2, call.columns);
    values = carver.take_panels(kChunkKeys, call.v_words);
    dk = carver.take_panels(kChunkKeys, call.columns);
    dv = carver.take_panels(kChunkKeys, call.v_columns);
  }
};

/// One head's rows of a strip.
struct StripBuffers {
  Panels q;        // [rows, words]
  Panels q_pairs;  // [rows, columns], pairs of rows
  Panels dout;     // [rows, v_words]
  Panels dout_pairs;
  float* queries;      // [tiles] of [words, kTileRows]
  float* out_columns;  // [tiles] of [v_words, kTileRows]: dout transposed
  float* lse;          // [rows]
  float* delta;        // [rows]

  StripBuffers(const KernelCall& call, FloatCarver& carver) {
    const int64_t elements = call.micro->word_elements;
    q = carver.take_panels(kStripRows, call.words);
    dout = carver.take_panels(kStripRows, call.v_words);
    q_pairs = elements == 1 ? q : carver.take_panels(kStripRows / elements, call.columns);
    dout_pairs = elements == 1 ? dout : carver.take_panels(kStripRows / elements, call.v_columns);
    queries = carver.take(kStripRows * round_up(call.words, kColumnUnit));
    out_columns = carver.take(kStripRows * round_up(call.v_words, kColumnUnit));
    lse = carver.take(kStripRows);
    delta = carver.take(kStripRows);
  }

  void load(const KernelCall& call, const Scores& scores, const Task& task, int64_t head, int64_t task_row,
            int64_t rows) const {
    load_rows(call, task.q, head, task_row, rows, call.problem->heads.dim, query_sign(scores), q, q_pairs, queries);
    load_rows(call, task.dout, head, task_row, rows, call.problem->heads.v_dim, 1, dout, dout_pairs, out_columns);
    load_column(task.lse, task_row, head, rows, lse);
    load_column(task.delta, task_row, head, rows, delta);
    // Rows past the last one get no probability.
    std::fill(lse + rows, lse + round_up(rows, kTileRows), -kInfinity);
    std::fill(delta + rows, delta + round_up(rows, kTileRows), 0.f);
  }

  static void load_rows(const KernelCall& call, const RowView& view, int64_t head, int64_t task_row, int64_t rows,
                        int64_t dim, int sign, Panels packed, Panels pairs, float* transposed) {
    const MicroKernel& micro = *call.micro;
    const DType dtype = call.problem->heads.dtype;
    const int64_t words = call.words_of(dim);
    micro.pack_rows(dtype, rows, dim, view.at(task_row, head), view.row_stride, packed);
    if (pairs.data != packed.data) {
      micro.pack_row_pairs(dtype, rows, dim, view.at(task_row, head), view.row_stride, pairs);
      clear_rows(pairs, panels_of(dim), call.row_words(rows), call.row_words(call.unit_rows(rows)));
    }
    for (int64_t row = 0; row < rows; row += kTileRows)
      micro.transpose_rows(std::min(kTileRows, rows - row), words, sign, packed.data + row * kPanelWords,
                           packed.panel_stride, transposed + row * round_up(words, kColumnUnit));
  }
};

/// Scores of a step and what is computed from them.
struct StepBuffers {
  float* scores;       // [keys, kTileRows]
  float* dprobs;       // the same
  float* dscore_rows;  // [pairs of keys, kTileRows]
  Panels probs;        // [keys, rows of the strip], pairs of columns
  Panels dscores;      // the same

  StepBuffers(const KernelCall& call, FloatCarver& carver) {
    scores = carver.take(kStepKeys * kTileRows);
    dprobs = carver.take(kStepKeys * kTileRows);
    dscore_rows = carver.take(kStepKeys * kTileRows / 2);
    probs = carver.take_panels(kStepKeys, kStripRows / call.micro->word_elements);
    dscores = carver.take_panels(kStepKeys, kStripRows / call.micro->word_elements);
  }
};

struct Buffers {
  ChunkBuffers chunk;
  StripBuffers strip;
  StepBuffers step;
  Buffers(const KernelCall& call, FloatCarver& carver) : chunk(call, carver), strip(call, carver), step(call, carver) {}
};

int64_t gradient_scratch(const KernelCall& call) {
  FloatCarver carver(nullptr);
  Buffers(call, carver);
  return carver.used_floats();
}

/// The rows of q and dout that are packed next. They lie far apart in memory. Therefore they are fetched into the cache
/// while the strip before them is at work.
struct RowsToCome {
  const Task* task = nullptr;
  int64_t head = 0;
  int64_t task_row = 0;
  int64_t rows = 0;

  void prefetch(const HeadShape& heads, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < std::min(end, rows); ++i) {
      prefetch_bytes(task->q.at(task_row + i, head), heads.dim * heads.element_bytes());
      prefetch_bytes(task->dout.at(task_row + i, head), heads.v_dim * heads.element_bytes());
    }
  }
};

Panels from_row(Panels panels, int64_t row) { return {panels.data + row * kPanelWords, panels.panel_stride}; }

/// Computes P and dS of one tile against one step, and adds to the strip's dq. `key` is the step's first row in the
/// chunk, `row` the tile's first row in the strip.
void compute_tile(const KernelCall& call, const Scores& scores, int64_t key, int64_t row, int64_t rows, Visible visible,
                  const Buffers& buffers, float* dq) {
  const MicroKernel& micro = *call.micro;
  const ScoreTile tile = tile_of(call, rows, visible);
  if (tile.begin == tile.end) return;
  const StripBuffers& strip = buffers.strip;
  const StepBuffers& step = buffers.step;
  const ScoreProduct product{tile,
                             call.words,
                             from_row(buffers.chunk.keys, key).data,
                             buffers.chunk.keys.panel_stride,
                             strip.queries + row * round_up(call.words, kColumnUnit),
                             step.scores};
  const ScoreProduct of_values{tile,
                               call.v_words,
                               from_row(buffers.chunk.values, key).data,
                               buffers.chunk.values.panel_stride,
                               strip.out_columns + row * round_up(call.v_words, kColumnUnit),
                               step.dprobs};
  const float scale = softmax_scale(scores), cap = scores.softcap;
  // Words of P and dS are pairs of query rows.
  const int64_t elements = micro.word_elements, word = row / elements;
  const int64_t at = word / kPanelWords * step.probs.panel_stride + word % kPanelWords;
  const GradientOutputs outputs{step.probs.data + at, step.dscores.data + at, step.dscore_rows};
  micro.multiply_scores(product);
  micro.multiply_scores(of_values);
  if (cap != 0.f) micro.cap_scores(tile, scale, cap, step.scores);
  micro.softmax_gradient(tile, cap != 0.f ? 1.f : scale, cap, strip.lse + row, strip.delta + row, step.scores,
                         step.dprobs, outputs);
  micro.add_values(tile, rows, call.columns, elements == 1 ? outputs.dscores : step.dscore_rows, buffers.chunk.summed,
                   key, {tile_dq(call, dq, row), nullptr, false});
}

/// Adds the contribution of `rows` rows of a strip, the first of which is document row `first`, to the gradients of the
/// chunk [begin, end) and to dq.
void add_strip(const KernelCall& call, const Scores& scores, const DocumentMask& mask, int64_t first, int64_t rows,
               int64_t begin, int64_t end, const Buffers& buffers, float* dq, const RowsToCome& next) {
  const MicroKernel& micro = *call.micro;
  constexpr int64_t kRowsFetched = kTileRows / (kChunkKeys / kStepKeys);
  const int64_t chunk = round_down(begin, kChunkKeys);
  const int64_t first_key = mask.first_key(first), end_key = mask.end_key(first + rows - 1, end);
  SeenRanges<kTileRows> keys;
  SeenRanges<kStepKeys> seeing;
  for (int64_t start = round_down(begin, kStepKeys); start < end; start += kStepKeys) {
    const int64_t step_end = std::min(start + kStepKeys, end), key = start - chunk;
    const int64_t part = key / kStepKeys * kRowsFetched;
    if (first_key >= step_end || end_key <= start) continue;
    const int64_t num_keys = step_end - start;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      next.prefetch(call.problem->heads, row + part, row + part + kRowsFetched);
      const int64_t tile_rows = std::min(kTileRows, rows - row);
      keys.set_keys(mask, first + row, tile_rows, start, num_keys);
      compute_tile(call, scores, key, row, tile_rows, keys.visible(), buffers, dq);
    }
    seeing.set_rows(mask, start, num_keys, first, rows);
    micro.multiply_visible(num_keys, call.v_columns, seeing.visible(), buffers.step.probs, buffers.strip.dout_pairs,
                           from_row(buffers.chunk.dv, key));
    micro.multiply_visible(num_keys, call.columns, seeing.visible(), buffers.step.dscores, buffers.strip.q_pairs,
                           from_row(buffers.chunk.dk, key));
  }
}

/// Waits until `turn` chunks are done with a strip: then it is the next chunk's turn.
void await_turn(const std::atomic<int32_t>& progress, int64_t turn) {
  for (int spins = 0; progress.load(std::memory_order_acquire) != static_cast<int32_t>(turn); ++spins)
    if (spins > 1000) std::this_thread::yield();
}

/// Writes rows of dk or dv, times `factor`, to where a run goes, or adds them to what is there.
void store_gradients(const KernelCall& call, const KeyGradRun& run, int64_t rows, int64_t dim, float factor,
                     Panels sums, std::byte* dst, int64_t dst_stride) {
  if (!run.is_added) {
    call.micro->store_rows(run.dtype, rows, dim, factor, nullptr, sums, dst, dst_stride);
    return;
  }
  float term[kMostHeadDim];
  for (int64_t row = 0; row < rows; ++row) {
    call.micro->store_rows(DType::kFloat32, 1, dim, factor, nullptr, from_row(sums, row),
                           reinterpret_cast<std::byte*>(term), dim * 4);
    auto* const to = reinterpret_cast<float*>(dst + row * dst_stride);
    for (int64_t i = 0; i < dim; ++i) to[i] += term[i];
  }
}

void store_key_gradients(const KernelCall& call, const KeyGroup& group, int64_t kv_head, int64_t begin, int64_t end,
                         const ChunkBuffers& chunk) {
  const HeadShape& heads = call.problem->heads;
  auto run =
      std::partition_point(group.grads.begin(), group.grads.end(), [&](const KeyGradRun& r) { return r.end <= begin; });
  for (; run != group.grads.end() && run->begin < end; ++run) {
    const int64_t first = std::max(run->begin, begin), rows = std::min(run->end, end) - first;
    const int64_t row = first - round_down(begin, kChunkKeys);
    store_gradients(call, *run, rows, heads.dim, call.problem->scores_of(group).scale, from_row(chunk.dk, row),
                    run->dk.at(first - run->begin, kv_head), run->dk.row_stride);
    store_gradients(call, *run, rows, heads.v_dim, 1.f, from_row(chunk.dv, row),
                    run->dv.at(first - run->begin, kv_head), run->dv.row_stride);
  }
}

void work_on_chunk(const KernelCall& call, const WorkItem& item, WorkerItems&, float* scratch) {
  const Unit& unit = call.units[static_cast<size_t>(item.unit)];
  const KeyGroup& group = call.group_of(unit);
  const Scores& scores = call.scores_of(unit);
  const DocumentMask mask = call.problem->mask_of(group);
  FloatCarver carver(scratch);
  const Buffers buffers(call, carver);
  const ChunkBuffers& chunk = buffers.chunk;
  const int64_t start = round_down(item.begin, kChunkKeys), chunk_index = start / kChunkKeys;
  pack_keys(call, group, group.k, unit.kv_head, start, item.begin, item.end, call.problem->heads.dim, chunk.keys);
  pack_keys(call, group, group.v, unit.kv_head, start, item.begin, item.end, call.problem->heads.v_dim, chunk.values);
  if (chunk.summed.data != chunk.keys.data)
    pack_values(call, group, group.k, unit.kv_head, start, item.begin, item.end, call.problem->heads.dim, chunk.summed);
  clear_rows(chunk.dk, panels_of(call.columns), 0, call.unit_rows(item.end - start));
  clear_rows(chunk.dv, panels_of(call.v_columns), 0, call.unit_rows(item.end - start));

  int64_t strip = 0;  // index of the strip in the unit
  for (int64_t t = group.task_begin; t < group.task_end; ++t) {
    const Task& task = call.problem->tasks[static_cast<size_t>(t)];
    const RowRange seeing = rows_seeing(mask, task, item.begin, item.end);
    for (int64_t begin = task.q_begin; begin < task.q_end; begin += kStripRows, ++strip) {
      const int64_t end = std::min(begin + kStripRows, task.q_end);
      if (end <= seeing.begin || begin >= seeing.end) continue;
      const int64_t first_chunk = mask.first_key(begin) / kChunkKeys;
      for (int64_t h = 0; h < call.group_heads; ++h) {
        float* const dq = strip_dq(call, unit, strip, h);
        std::atomic<int32_t>& progress = call.progress[unit.first_strip + strip * call.group_heads + h];
        buffers.strip.load(call, scores, task, unit.kv_head * call.group_heads + h, begin - task.q_begin, end - begin);
        await_turn(progress, chunk_index - first_chunk);
        if (chunk_index == first_chunk) std::fill_n(dq, strip_floats(call), 0.f);
        RowsToCome next{&task, unit.kv_head * call.group_heads, end - task.q_begin,
                        std::min(kStripRows, std::min(task.q_end, seeing.end) - end)};
        if (h + 1 < call.group_heads)
          next = {&task, unit.kv_head * call.group_heads + h + 1, begin - task.q_begin, end - begin};
        add_strip(call, scores, mask, begin, end - begin, item.begin, item.end, buffers, dq, next);
        progress.store(static_cast<int32_t>(chunk_index - first_chunk + 1), std::memory_order_release);
      }
    }
  }
  store_key_gradients(call, group, unit.kv_head, item.begin, item.end, chunk);
}

// ---- dq

int64_t no_scratch(const KernelCall&) { return 0; }

void store_query_gradients(const KernelCall& call, const WorkItem& item, WorkerItems&, float*) {
  const HeadShape& heads = call.problem->heads;
  const Unit& unit = call.units[static_cast<size_t>(item.unit)];
  const KeyGroup& group = call.group_of(unit);
  int64_t strip = 0;
  for (int64_t t = group.task_begin; t < item.task; ++t)
    strip += strips_of(call.problem->tasks[static_cast<size_t>(t)]);
  const Task& task = call.problem->tasks[static_cast<size_t>(item.task)];
  for (int64_t begin = item.begin; begin < item.end;) {
    const int64_t task_row = begin - task.q_begin, row = task_row % kStripRows;
    const int64_t rows = std::min(kTileRows, item.end - begin);  // work items are whole tiles
    for (int64_t h = 0; h < call.group_heads; ++h) {
      const int64_t head = unit.kv_head * call.group_heads + h;
      const float* const dq = tile_dq(call, strip_dq(call, unit, strip + task_row / kStripRows, h), row);
      call.micro->store_sums(heads.dtype, rows, heads.dim, call.scores_of(unit).scale, nullptr, dq,
                             task.dq.at(task_row, head), task.dq.row_stride);
    }
    begin += rows;
  }
}

}  // namespace

const Pass kGradientPass = {gradient_scratch, work_on_chunk};
const Pass kStoreQueryGradientPass = {no_scratch, store_query_gradients};

int64_t backward_unit_floats(const KernelCall& call, const KeyGroup& group) {
  return strips_of(call, group) * call.group_heads * strip_floats(call);
}
int64_t backward_unit_strips(const KernelCall& call, const KeyGroup& group) {
  return strips_of(call, group) * call.group_heads;
}

}  // namespace distca::attention
