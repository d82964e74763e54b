// Forward. Keys and values are packed once for each unit. Then the online softmax of some query rows goes over the
// steps of keys in ascending order.
//
// A unit with few keys is the work of one worker, which packs its keys and attends all its query rows. What it has
// packed stays in its cache. It packs some heads of a document together, because their rows lie side by side in memory,
// and fetches the query rows of the next head while it computes. Other units are packed by one pass, and their query
// rows are attended by a second one.
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "attention/cpu_kernel.h"

namespace distca::attention {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Packed keys and values of one step of a unit.
struct PackedStep {
  int64_t begin;  // document rows
  int64_t end;
  Panels keys;    // [keys, words]
  Panels values;  // [keys, v_columns], from pack_values
};

int64_t floats_per_key(const KernelCall& call) {
  // With pairs, a step holds an even number of keys.
  return panels_of(call.words) * kPanelWords + panels_of(call.v_columns) * kPanelWords / call.micro->word_elements;
}

/// The step whose first document row is `step`, of a unit whose packed steps begin at `packed`.
PackedStep packed_step(const KernelCall& call, const KeyGroup& group, float* packed, int64_t step) {
  const int64_t first = round_down(group.kv_begin, kStepKeys);
  const int64_t rows = call.unit_rows(std::min(step + kStepKeys, group.kv_end) - step);
  const int64_t key_panels = panels_of(call.words), value_rows = call.row_words(rows);
  float* data = packed + (step - first) * floats_per_key(call);
  return {std::max(step, group.kv_begin),
          std::min(step + kStepKeys, group.kv_end),
          {data, rows * kPanelWords},
          {data + rows * key_panels * kPanelWords, value_rows * kPanelWords}};
}

// ---- pack

int64_t no_scratch(const KernelCall&) { return 0; }

/// Packs keys [step_begin, step_end) of one step for some units of one group; packed_at(u) is where those of units[u]
/// begin. It packs a few rows of every head at a time, because the heads of a row lie side by side in memory.
template <class PackedAt>
void pack_heads(const KernelCall& call, std::span<const Unit> units, int64_t step_begin, int64_t step_end,
                const PackedAt& packed_at) {
  const int64_t most = std::max<int64_t>(16, call.micro->row_unit);
  const HeadShape& heads = call.problem->heads;
  const KeyGroup& group = call.group_of(units.front());
  const int64_t start = round_down(step_begin, kStepKeys);
  for (const auto& [views, is_keys] : {std::pair{&group.k, true}, {&group.v, false}}) {
    for (int64_t begin = step_begin; begin < step_end;) {
      const int64_t end = std::min(round_down(begin, most) + most, step_end);
      for (int64_t u = 0; u < std::ssize(units); ++u) {
        const PackedStep step = packed_step(call, group, packed_at(u), start);
        const int64_t head = units[static_cast<size_t>(u)].kv_head;
        if (is_keys)
          pack_keys(call, group, *views, head, start, begin, end, heads.dim, step.keys);
        else
          pack_values(call, group, *views, head, start, begin, end, heads.v_dim, step.values);
      }
      begin = end;
    }
  }
}

/// Packs one step of keys for all units of the batch that belong to one group.
void pack_step(const KernelCall& call, const WorkItem& item, WorkerItems&, float*) {
  const auto units = call.units.subspan(static_cast<size_t>(item.unit));
  const auto end = std::ranges::find_if(units, [&](const Unit& u) { return u.group != units.front().group; });
  pack_heads(call, std::span(units.begin(), end), item.begin, item.end,
             [&](int64_t u) { return call.memory + units[static_cast<size_t>(u)].offset; });
}

// ---- rows to come

/// The query rows of a unit that is computed next, and where their results go. They lie far apart in memory. Therefore
/// they are fetched into the cache while the unit before it is at work, a few at a time, because a core has few under
/// way at once and then stands still.
class UnitToCome {
 public:
  UnitToCome(const KernelCall& call, const Unit& unit)
      : call_(call), unit_(unit), group_(call.group_of(unit)), task_(group_.task_begin) {}

  /// Is called some times for each step of the softmax of a tile.
  void prefetch_some() {
    const int64_t most = call_.micro->softmax_keys / 16;
    for (int64_t i = 0; i < most && task_ < group_.task_end; ++i) prefetch_query();
  }

 private:
  void prefetch_query() {
    const HeadShape& heads = call_.problem->heads;
    const Task& task = call_.problem->tasks[static_cast<size_t>(task_)];
    const int64_t bytes = call_.group_heads * heads.element_bytes(), head = unit_.kv_head * call_.group_heads;
    prefetch_bytes(task.q.at(task_row_, head), heads.dim * bytes);
    prefetch_bytes(task.out.at(task_row_, head), heads.v_dim * bytes);
    if (++task_row_ < task.q_end - task.q_begin) return;
    task_row_ = 0;
    ++task_;
  }

  const KernelCall& call_;
  const Unit& unit_;
  const KeyGroup& group_;
  int64_t task_;  // of the next row
  int64_t task_row_ = 0;
};

// ---- attend

struct Buffers {
  int64_t tiles;    // tiles of a head
  Panels rows;      // a tile's queries as they lie
  float* scores;    // of a tile: [keys, kTileRows]
  float* queries;   // [heads, tiles] of [words, kTileRows]
  float* out;       // [heads, tiles] of sums [kTileRows, v_columns]
  float* row_base;  // [heads, tiles, kTileRows]
  float* row_sum;   // the same
  float* row_max;   // the same
  float* rescale;   // [kTileRows]

  Buffers(const KernelCall& call, FloatCarver& carver) {
    tiles = panels_of(call.item_rows);
    const int64_t all = call.group_heads * tiles;
    rows = carver.take_panels(kTileRows, call.words);
    scores = carver.take(call.micro->softmax_keys * kTileRows);
    queries = carver.take(all * query_floats(call));
    out = carver.take(all * out_floats(call));
    row_base = carver.take(all * kTileRows);
    row_sum = carver.take(all * kTileRows);
    row_max = carver.take(all * kTileRows);
    rescale = carver.take(kTileRows);
  }

  static int64_t query_floats(const KernelCall& call) { return round_up(call.words, kColumnUnit) * kTileRows; }
  static int64_t out_floats(const KernelCall& call) { return panels_of(call.v_columns) * kPanelWords * kTileRows; }
};

int64_t forward_scratch(const KernelCall& call) {
  FloatCarver carver(nullptr);
  Buffers(call, carver);
  return carver.used_floats();
}

/// One tile of queries, and the keys of a step that it sees.
struct Pairing {
  int64_t tile;  // of all heads
  int64_t rows;
  bool is_first;  // of the tile's steps
  ScoreTile shape;
};

/// Attends one tile of queries to one step of the online softmax, which begins `key` rows after the packed step.
/// Meanwhile it fetches rows of the unit to come, if there is one.
void attend(const KernelCall& call, const Scores& scores, const PackedStep& step, int64_t key, const Pairing& pairing,
            const Buffers& buffers, UnitToCome* next) {
  const MicroKernel& micro = *call.micro;
  const ScoreTile& shape = pairing.shape;
  const int64_t tile = pairing.tile;
  const auto prefetch_some = [&] {
    if (next != nullptr) next->prefetch_some();
  };
  prefetch_some();
  micro.multiply_scores({shape, call.words, step.keys.data + key * kPanelWords, step.keys.panel_stride,
                         buffers.queries + tile * Buffers::query_floats(call), buffers.scores});
  prefetch_some();
  float scale = softmax_scale(scores);
  if (scores.softcap != 0.f) {
    micro.cap_scores(shape, scale, scores.softcap, buffers.scores);
    scale = 1.f;
  }
  micro.softmax_step(shape, scale, buffers.scores,
                     {buffers.row_base + tile * kTileRows, buffers.row_sum + tile * kTileRows,
                      buffers.row_max + tile * kTileRows, buffers.rescale});
  prefetch_some();
  micro.add_values(shape, pairing.rows, call.v_columns, buffers.scores, step.values, key,
                   {buffers.out + tile * Buffers::out_floats(call), buffers.rescale, pairing.is_first});
}

/// Writes `rows` values of a column of a [rows, heads, 1] fp32 view.
void store_column(const RowView& view, int64_t row, int64_t head, int64_t rows, const float* src) {
  std::byte* to = view.at(row, head);
  for (int64_t i = 0; i < rows; ++i, to += view.row_stride) std::memcpy(to, src + i, sizeof(float));
}

/// Raises a maximum that workers share. NaN is above all numbers, 0 above -0.
void raise(float& maximum, float value) {
  const std::atomic_ref<float> shared(maximum);
  const float raised = value + 0.f;
  float now = shared.load(std::memory_order_relaxed);
  while (!std::isnan(now) && !(raised <= now)) {
    if (shared.compare_exchange_weak(now, raised, std::memory_order_relaxed)) break;
  }
}

/// The largest score of some rows. The sums of those whose scores are no numbers are none.
float largest_score(int64_t rows, const float* row_max, const float* row_sum) {
  float largest = -kInfinity;
  for (int64_t i = 0; i < rows; ++i) {
    if (std::isnan(row_sum[i])) return row_sum[i];
    largest = std::max(largest, row_max[i]);
  }
  return largest;
}

/// Attends the query rows of an item to the keys that are packed at `packed`.
void attend_rows(const KernelCall& call, const WorkItem& item, float* packed, const Buffers& buffers,
                 UnitToCome* next) {
  const HeadShape& heads = call.problem->heads;
  const MicroKernel& micro = *call.micro;
  const Unit& unit = call.units[static_cast<size_t>(item.unit)];
  const KeyGroup& group = call.group_of(unit);
  const Scores& scores = call.scores_of(unit);
  const DocumentMask mask = call.problem->mask_of(group);
  const Task& task = call.problem->tasks[static_cast<size_t>(item.task)];
  const int64_t tiles = panels_of(item.end - item.begin);
  const auto rows_of = [&](int64_t t) { return std::min(kTileRows, item.end - item.begin - t * kTileRows); };

  // All rows of q are read before any row of out is written, because they may be the same memory.
  for (int64_t h = 0; h < call.group_heads; ++h) {
    for (int64_t t = 0; t < tiles; ++t) {
      micro.pack_rows(heads.dtype, rows_of(t), heads.dim,
                      task.q.at(item.begin - task.q_begin + t * kTileRows, unit.kv_head * call.group_heads + h),
                      task.q.row_stride, buffers.rows);
      micro.transpose_rows(rows_of(t), call.words, query_sign(scores), buffers.rows.data, buffers.rows.panel_stride,
                           buffers.queries + (h * tiles + t) * Buffers::query_floats(call));
    }
  }
  const int64_t all = call.group_heads * tiles;
  std::fill_n(buffers.row_base, all * kTileRows, -kInfinity);
  std::fill_n(buffers.row_sum, all * kTileRows, 0.f);
  std::fill_n(buffers.row_max, all * kTileRows, -kInfinity);

  SeenRanges<kTileRows> seen[kMostTiles];
  int64_t first_step[kMostTiles];  // in which a row of the tile sees a key
  for (int64_t t = 0; t < tiles; ++t)
    first_step[t] = round_down(mask.first_key(item.begin + t * kTileRows), micro.softmax_keys);
  const int64_t end_key = mask.end_key(item.end - 1, group.kv_end), first_key = mask.first_key(item.begin);
  for (int64_t start = round_down(first_key, micro.softmax_keys); start < end_key; start += micro.softmax_keys) {
    const int64_t step_start = round_down(start, kStepKeys);
    const PackedStep step = packed_step(call, group, packed, step_start);
    const int64_t num_keys = std::min(start + micro.softmax_keys, step.end) - start;
    for (int64_t t = 0; t < tiles; ++t) seen[t].set_keys(mask, item.begin + t * kTileRows, rows_of(t), start, num_keys);
    for (int64_t tile = 0; tile < all; ++tile) {
      const int64_t t = tile % tiles;
      const bool is_first = start == first_step[t];
      const Pairing pairing{tile, rows_of(t), is_first, tile_of(call, rows_of(t), seen[t].visible())};
      if (pairing.shape.begin == pairing.shape.end) continue;
      attend(call, scores, step, start - step_start, pairing, buffers, next);
    }
  }

  for (int64_t h = 0; h < call.group_heads; ++h) {
    const int64_t head = unit.kv_head * call.group_heads + h;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t tile = h * tiles + t, task_row = item.begin - task.q_begin + t * kTileRows;
      const float* row_sum = buffers.row_sum + tile * kTileRows;
      alignas(64) float lse[kTileRows];
      micro.log_sum_exp(buffers.row_base + tile * kTileRows, row_sum, lse);
      store_column(task.lse, task_row, head, rows_of(t), lse);
      if (task.max_logits != nullptr)
        raise(task.max_logits[head], largest_score(rows_of(t), buffers.row_max + tile * kTileRows, row_sum));
      micro.store_sums(heads.dtype, rows_of(t), heads.v_dim, 1.f, row_sum,
                       buffers.out + tile * Buffers::out_floats(call), task.out.at(task_row, head),
                       task.out.row_stride);
    }
  }
}

void work_on_rows(const KernelCall& call, const WorkItem& item, WorkerItems&, float* scratch) {
  FloatCarver carver(scratch);
  const Buffers buffers(call, carver);
  const Unit& unit = call.units[static_cast<size_t>(item.unit)];
  attend_rows(call, item, call.memory + unit.offset, buffers, nullptr);
}

// ---- whole units

int64_t whole_units_scratch(const KernelCall& call) { return forward_scratch(call) + kMostWholeUnitFloats; }

/// Attends all query rows of a unit to its keys, which are packed at `packed`.
void attend_unit(const KernelCall& call, int64_t unit, float* packed, const Buffers& buffers, UnitToCome* next) {
  const KeyGroup& group = call.group_of(call.units[static_cast<size_t>(unit)]);
  for (int64_t t = group.task_begin; t < group.task_end; ++t) {
    const Task& task = call.problem->tasks[static_cast<size_t>(t)];
    for (int64_t begin = task.q_begin; begin < task.q_end; begin += call.item_rows) {
      const WorkItem rows{0, unit, t, begin, std::min(begin + call.item_rows, task.q_end)};
      attend_rows(call, rows, packed, buffers, next);
    }
  }
}

void work_on_units(const KernelCall& call, const WorkItem& item, WorkerItems& items, float* scratch) {
  FloatCarver carver(scratch);
  const Buffers buffers(call, carver);
  float* const packed = carver.take(kMostWholeUnitFloats);
  const KeyGroup& group = call.group_of(call.units[static_cast<size_t>(item.begin)]);
  const int64_t unit_floats = forward_unit_floats(call, group);
  const auto packed_at = [&](int64_t i) { return packed + i * unit_floats; };
  const int64_t most = kMostWholeUnitFloats / std::max<int64_t>(unit_floats, 1);
  for (int64_t first = item.begin; first < item.end;) {
    const int64_t end = std::min(first + most, item.end);
    const auto units = call.units.subspan(static_cast<size_t>(first), static_cast<size_t>(end - first));
    for_each_step(group, [&](int64_t key, int64_t key_end) { pack_heads(call, units, key, key_end, packed_at); });
    for (int64_t u = first; u < end; ++u) {
      std::optional<UnitToCome> next;
      if (u + 1 < item.end)
        next.emplace(call, call.units[static_cast<size_t>(u + 1)]);
      else if (const WorkItem* ahead = items.look_ahead())
        next.emplace(call, call.units[static_cast<size_t>(ahead->begin)]);
      attend_unit(call, u, packed_at(u - first), buffers, next ? &*next : nullptr);
    }
    first = end;
  }
}

}  // namespace

const Pass kWholeUnitsPass = {whole_units_scratch, work_on_units};
const Pass kPackKeysPass = {no_scratch, pack_step};
const Pass kForwardPass = {forward_scratch, work_on_rows};

int64_t forward_unit_floats(const KernelCall& call, const KeyGroup& group) {
  const int64_t rows = call.unit_rows(group.kv_end) - round_down(group.kv_begin, kStepKeys);
  return rows * floats_per_key(call);
}

}  // namespace distca::attention
