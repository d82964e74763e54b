// The common parts of the passes of the CPU kernel. A call is cut into batches of units; a unit is one key/value head
// of a group. A pass over a batch is a list of independent work items. They are handed out longest first to workers,
// each of which has scratch memory of its own. Units with few keys are one batch of their own in forward, which takes
// no memory but that scratch.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/micro_kernel.h"
#include "common/align.h"

namespace distca::attention {

static_assert(kStepKeys % kKeyBlockRows == 0);

/// Keys of a work item of the backward pass; results do not depend on it.
inline constexpr int64_t kChunkKeys = 4 * kStepKeys;
/// Tiles of the query rows of a work item, of one head.
inline constexpr int64_t kMostTiles = 8;

inline constexpr int64_t round_down(int64_t n, int64_t multiple) { return n / multiple * multiple; }
inline constexpr int64_t panels_of(int64_t words) { return ceil_div(words, kPanelWords); }

/// Aligned memory that only grows and is not initialised.
class Buffer {
 public:
  float* data() const { return data_.get(); }
  void reserve(int64_t floats) {
    if (floats <= size_) return;
    data_.reset();
    size_ = 0;
    const auto bytes = static_cast<size_t>(round_up(floats * 4, kHugePage));
    void* p = std::aligned_alloc(kHugePage, bytes);
    if (p == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(p, bytes, MADV_HUGEPAGE);  // packed rows are read from end to end; a refusal only costs speed
#endif
    data_.reset(static_cast<float*>(p));
    size_ = floats;
  }

 private:
  static constexpr int64_t kHugePage = int64_t{1} << 21;
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

/// Carves arrays of floats out of the scratch memory of a pass, each on cache lines of its own.
class FloatCarver : public Carver<64> {
 public:
  using Carver::Carver;
  float* take(int64_t floats) { return Carver::take<float>(floats); }
  /// A packed matrix of `rows` rows.
  Panels take_panels(int64_t rows, int64_t words) {
    return {take(rows * panels_of(words) * kPanelWords), rows * kPanelWords};
  }
  int64_t used_floats() const { return static_cast<int64_t>(used() / sizeof(float)); }
};

/// One key/value head of a group, the query heads that share it, and where the batch's memory has its part.
struct Unit {
  int64_t group;
  int64_t kv_head;
  int64_t offset = 0;  // where its floats begin in the batch's memory
  int64_t num_floats = 0;
  int64_t first_strip = 0;  // index of its first strip in the batch (see cpu_backward.cpp)
  int64_t wave = 0;  // backward: how many groups store before its own, one after another; batches are of one wave
};

/// Rows [begin, end) of a document for one unit: query rows of task `task`, or key rows where the pass goes over keys.
/// Where the pass goes over units, units [begin, end) of the batch.
struct WorkItem {
  int64_t cost;
  int64_t unit;
  int64_t task;
  int64_t begin;
  int64_t end;
};

/// Hands the items of a pass to one of the workers that share them, one after another.
class WorkerItems {
 public:
  /// `next` is the number of the next item that no worker has.
  WorkerItems(std::span<const WorkItem> items, int64_t num_workers, std::atomic<int64_t>& next)
      : items_(items), num_workers_(num_workers), next_(next) {}

  /// Null where all are taken.
  const WorkItem* take() { return ahead_ != nullptr ? std::exchange(ahead_, nullptr) : take_any(); }
  /// What take() will return, or null. The worker has this item from now on. Therefore there is none where so few are
  /// left that another worker might wait for it.
  const WorkItem* look_ahead() {
    const int64_t left = std::ssize(items_) - next_.load(std::memory_order_relaxed);
    if (ahead_ == nullptr && left > num_workers_) ahead_ = take_any();
    return ahead_;
  }

 private:
  const WorkItem* take_any() {
    const auto i = static_cast<size_t>(next_.fetch_add(1, std::memory_order_relaxed));
    return i < items_.size() ? &items_[i] : nullptr;
  }

  std::span<const WorkItem> items_;
  int64_t num_workers_;
  std::atomic<int64_t>& next_;
  const WorkItem* ahead_ = nullptr;
};

/// The problem, the batch and the numbers that follow from them, as a worker sees them.
struct KernelCall {
  const Problem* problem = nullptr;
  const MicroKernel* micro = nullptr;
  std::span<const Unit> units;               // of the batch
  float* memory = nullptr;                   // of the batch
  std::atomic<int32_t>* progress = nullptr;  // of the batch's strips
  int64_t group_heads = 0;                   // query heads that share a key/value head
  int64_t words = 0;                         // packed words of a row of q and k
  int64_t v_words = 0;                       // packed words of a row of v and dout
  int64_t columns = 0;                       // columns of dq and dk as products
  int64_t v_columns = 0;                     // columns of out and dv as products
  int64_t item_rows = 0;                     // most query rows of a work item

  KernelCall() = default;
  KernelCall(const Problem& p, const MicroKernel& m);

  int64_t words_of(int64_t elements) const { return elements / micro->word_elements; }
  /// `rows` up to the next number of rows that products are computed for.
  int64_t unit_rows(int64_t rows) const { return round_up(rows, micro->row_unit); }
  /// Number of rows that `rows` rows take when packed as pairs.
  int64_t row_words(int64_t rows) const { return (rows + micro->word_elements - 1) / micro->word_elements; }
  const KeyGroup& group_of(const Unit& unit) const { return problem->groups[static_cast<size_t>(unit.group)]; }
  const Scores& scores_of(const Unit& unit) const { return problem->scores_of(group_of(unit)); }
};

// A scale is a factor on queries times a factor on scores in the softmax. With scale 0 the queries become zero.
inline int query_sign(const Scores& scores) { return scores.scale > 0.f ? 1 : scores.scale < 0.f ? -1 : 0; }
inline float softmax_scale(const Scores& scores) { return scores.scale == 0.f ? 1.f : std::abs(scores.scale); }

/// A pass over the items of a batch: the work, and how much scratch an item needs at most.
struct Pass {
  int64_t (*scratch_floats)(const KernelCall&);
  void (*work)(const KernelCall&, const WorkItem&, WorkerItems& items, float* scratch);
};

/// Forward of units with few keys: items are units of one group, and a unit's query rows are attended with its keys.
extern const Pass kWholeUnitsPass;
/// The floats of packed keys and values that such a unit may have, and all units that are packed together: half a
/// megabyte, a part of the second-level cache.
inline constexpr int64_t kMostWholeUnitFloats = int64_t{1} << 17;
/// Forward of other units: items of the first pass are steps of keys, items of the second are query rows.
extern const Pass kPackKeysPass;
extern const Pass kForwardPass;  // out and lse
/// Backward: items of the first pass are chunks of keys, items of the second are query rows.
extern const Pass kGradientPass;
extern const Pass kStoreQueryGradientPass;

/// The floats that one unit takes of the batch's memory.
int64_t forward_unit_floats(const KernelCall& call, const KeyGroup& group);
int64_t backward_unit_floats(const KernelCall& call, const KeyGroup& group);
/// The number of progress counters of one unit: for each strip of query rows and each query head, how many chunks of
/// keys are done with it.
int64_t backward_unit_strips(const KernelCall& call, const KeyGroup& group);

// ---- keys

/// Calls pack(document row, number of rows, source, byte stride of the source) for each run of document rows [begin,
/// end) that lies in one place.
template <class PackRows>
void for_each_run(const KeyGroup& group, const RowView (&views)[2], int64_t kv_head, int64_t begin, int64_t end,
                  const PackRows& pack) {
  for (int64_t row = begin; row < end;) {
    const int64_t block = row / kKeyBlockRows;
    const int64_t stop = std::min((block + 1) * kKeyBlockRows, end);
    const int64_t entry = group.blocks[static_cast<size_t>(block - group.first_block)];
    const RowView& view = views[entry & 1];
    pack(row, stop - row, view.at((entry >> 1) + row - block * kKeyBlockRows, kv_head), view.row_stride);
    row = stop;
  }
}

/// Calls work(begin, end) for the document rows of each step of the group's keys.
template <class Work>
void for_each_step(const KeyGroup& group, const Work& work) {
  for (int64_t begin = group.kv_begin; begin < group.kv_end;) {
    const int64_t end = std::min(round_down(begin, kStepKeys) + kStepKeys, group.kv_end);
    work(begin, end);
    begin = end;
  }
}

/// Zeroes rows [begin, end) of a packed matrix.
inline void clear_rows(Panels panels, int64_t num_panels, int64_t begin, int64_t end) {
  for (int64_t p = 0; p < num_panels; ++p)
    std::memset(panels.data + p * panels.panel_stride + begin * kPanelWords, 0,
                static_cast<size_t>((end - begin) * kPanelWords) * sizeof(float));
}

/// Packs keys or values of document rows [begin, end) into matrix rows from begin - start on. The rows after them, up
/// to the next multiple of row_unit, become zero. Rows before them are left alone.
inline void pack_keys(const KernelCall& call, const KeyGroup& group, const RowView (&views)[2], int64_t kv_head,
                      int64_t start, int64_t begin, int64_t end, int64_t dim, Panels dst) {
  const auto pack = [&](int64_t row, int64_t rows, const std::byte* src, int64_t stride) {
    const Panels at{dst.data + (row - start) * kPanelWords, dst.panel_stride};
    call.micro->pack_rows(call.problem->heads.dtype, rows, dim, src, stride, at);
  };
  for_each_run(group, views, kv_head, begin, end, pack);
  clear_rows(dst, panels_of(call.words_of(dim)), end - start, call.unit_rows(end - start));
}

/// Packs keys or values of document rows [begin, end) as values; row `start` would be the first one of dst. `begin` and
/// `end` are multiples of the row unit, or the first and the last row of the document that are packed.
inline void pack_values(const KernelCall& call, const KeyGroup& group, const RowView (&views)[2], int64_t kv_head,
                        int64_t start, int64_t begin, int64_t end, int64_t dim, Panels dst) {
  const auto pack = [&](int64_t row, int64_t rows, const std::byte* src, int64_t stride) {
    call.micro->pack_values(call.problem->heads.dtype, row - start, rows, dim, src, stride, dst);
  };
  for_each_run(group, views, kv_head, begin, end, pack);
}

/// Fetches memory into the second-level cache.
inline void prefetch_bytes(const std::byte* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  asm volatile("");  // GCC leaves out calls of a function that has no effect, and takes prefetches for none
}

// ---- what sees what

/// The ends of what each of up to kMost query rows sees of some keys, or each of so many keys of some query rows that
/// see it.
template <int64_t kMost>
class SeenRanges {
 public:
  /// What `n` query rows, from `row` on, see of `num_keys` keys, from `key` on.
  void set_keys(const DocumentMask& mask, int64_t row, int64_t n, int64_t key, int64_t num_keys) {
    const bool all = mask.first_key(row + n - 1) <= key && mask.end_key(row, key + num_keys) >= key + num_keys;
    if (set_whole(all, num_keys)) return;
    const int64_t window = mask.mask.window, first = row - key;
    set_ascending(window > 0 ? first - window + 1 : -kFar, num_keys, from_);
    set_ascending(!mask.mask.is_full() ? first + 1 : window > 0 ? first + window : kFar, num_keys, upto_);
    for_each_range(mask, row, n, [&](const BidirectionalRows& range, int64_t i) {
      const auto end = static_cast<int32_t>(std::clamp<int64_t>(range.end - key, 0, num_keys));
      upto_[i] = std::max(upto_[i], end);
    });
    repeat_last(n);
  }
  /// Which of `num_rows` query rows, from `row` on, see each of `n` keys, from `key` on.
  void set_rows(const DocumentMask& mask, int64_t key, int64_t n, int64_t row, int64_t num_rows) {
    const bool all = mask.first_row(key + n - 1) <= row && mask.end_row(key, row + num_rows) >= row + num_rows;
    if (set_whole(all, num_rows)) return;
    const int64_t window = mask.mask.window, first = key - row;
    set_ascending(!mask.mask.is_full() ? first : window > 0 ? first - window + 1 : -kFar, num_rows, from_);
    set_ascending(window > 0 ? first + window : kFar, num_rows, upto_);
    for_each_range(mask, key, n, [&](const BidirectionalRows& range, int64_t i) {
      const auto begin = static_cast<int32_t>(std::clamp<int64_t>(range.begin - row, 0, num_rows));
      from_[i] = std::min(from_[i], begin);
    });
    repeat_last(n);
  }
  Visible visible() const { return {from_, upto_}; }

 private:
  static constexpr int64_t kFar = int64_t{1} << 28;  // beyond any step, tile and strip

  /// Says that all see all of `limit`, if they do. Nearly always they did so before.
  bool set_whole(bool all, int64_t limit) {
    if (all && whole_ != limit) {
      std::fill_n(from_, kMost, 0);
      std::fill_n(upto_, kMost, static_cast<int32_t>(limit));
    }
    whole_ = all ? limit : -1;
    return all;
  }
  static void set_ascending(int64_t first, int64_t limit, int32_t (&ends)[kMost]) {
    const auto at = static_cast<int32_t>(std::clamp(first, -kFar, kFar)), most = static_cast<int32_t>(limit);
    for (int32_t i = 0; i < kMost; ++i) ends[i] = std::clamp(at + i, 0, most);
  }
  /// Calls widen(range, i) for each of `n` rows, or keys, first + i that are in a range of bidirectional rows.
  template <class Widen>
  static void for_each_range(const DocumentMask& mask, int64_t first, int64_t n, const Widen& widen) {
    if (mask.mask.is_full()) return;
    const BidirectionalRows* const end = mask.bidirectional.data() + mask.bidirectional.size();
    for (const BidirectionalRows* b = mask.ending_after(first); b != end && b->begin < first + n; ++b)
      for (int64_t i = std::max<int64_t>(b->begin - first, 0); i < std::min(b->end - first, n); ++i) widen(*b, i);
  }
  void repeat_last(int64_t n) {
    std::fill(from_ + n, from_ + kMost, from_[n - 1]);
    std::fill(upto_ + n, upto_ + kMost, upto_[n - 1]);
  }

  int64_t whole_ = -1;  // the limit of which all see all; -1: they do not
  alignas(64) int32_t from_[kMost];
  alignas(64) int32_t upto_[kMost];
};

/// The keys of a step that any of `rows` query rows sees, as a tile. It is empty (begin == end) if there are none.
inline ScoreTile tile_of(const KernelCall& call, int64_t rows, Visible visible) {
  const int64_t begin = visible.from[0], end = visible.upto[rows - 1];
  const int64_t lanes = round_up(rows, kColumnUnit);
  if (begin >= end) return {0, 0, lanes, visible};
  return {round_down(begin, call.micro->row_unit), call.unit_rows(end), lanes, visible};
}

struct RowRange {
  int64_t begin;
  int64_t end;
};

/// The task's query rows that may see any of the keys [begin, end).
inline RowRange rows_seeing(const DocumentMask& mask, const Task& task, int64_t begin, int64_t end) {
  return {std::max(task.q_begin, mask.first_row(begin)), mask.end_row(end - 1, task.q_end)};
}

/// Copies `rows` values of one head of a [rows, heads, 1] fp32 view.
inline void load_column(const RowView& view, int64_t row, int64_t head, int64_t rows, float* dst) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(dst + i, view.at(row + i, head), sizeof(float));
}

}  // namespace distca::attention
