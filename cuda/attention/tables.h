// The tables in device memory that the kernels read and that work_list.h makes from a Problem, and the arithmetic of
// tiles. Host and device share both.
//
// A tile is a number of consecutive tokens of a task times all query heads that share a key/value head: its row r is
// query head r % group_heads of token r / group_heads. Therefore one tile of keys serves all heads that share it
// (packed grouped-query attention). Rows beyond a tile's tokens are never loaded and stay zero in shared memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "common/dtype.h"
#include "common/rows.h"

#ifdef __CUDACC__
#define DISTCA_INLINE __host__ __device__ __forceinline__
#else
#define DISTCA_INLINE inline
#endif

namespace distca::attention::cuda {

/// Document rows of an entry of a block table. The copy engine loads keys in boxes of as many rows.
inline constexpr int kTableRows = 64;
/// Columns of a box: 128 bytes, the width of a swizzled row of shared memory.
inline constexpr int kBoxColumns = 64;

DISTCA_INLINE constexpr int minimum(int a, int b) { return a < b ? a : b; }
DISTCA_INLINE constexpr int maximum(int a, int b) { return a > b ? a : b; }
DISTCA_INLINE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// A CUtensorMap: what the copy engine knows of a tensor. Plain C++ does without CUDA's header. For kernels that do not
/// use the copy engine it begins with the MapSpec itself.
struct alignas(128) TensorMap {
  std::byte opaque[128];
};

/// The values that a tensor map is made of: three dimensions, of which the first is contiguous, the strides of the
/// others in bytes, and the box that is loaded at once.
struct MapSpec {
  const std::byte* data = nullptr;  // null: never loaded from
  int64_t sizes[3] = {};
  int64_t strides[2] = {};
  int box[3] = {};
};

/// A word in memory that somebody else raises. Work that waits for it starts when it is at least `value`.
struct Signal {
  const uint64_t* word = nullptr;  // null: nothing to wait for
  uint64_t value = 0;
};

/// Maps of a group: keys in two sources, then values in two.
inline constexpr int kMapsOfKeys = 2, kMapsOfGroup = 4;

/// Rows of a document.
struct RowRange {
  int begin;
  int end;
};

struct GroupEntry {
  int scores;  // index into KernelParams::scores
  int kv_begin;
  int kv_end;
  int first_block;  // number of the document block of its first block table entry
  int blocks;       // index of that entry in `blocks`
  int k_maps;       // index of its maps: keys in the local tensor and in the arena, then values in both
  int run_begin;    // gradients of keys: runs[run_begin, run_end)
  int run_end;
  int bidirectional_begin;  // rows that see each other: bidirectional[bidirectional_begin, bidirectional_end)
  int bidirectional_end;
};

struct TaskEntry {
  int group;
  int q_begin;
  int num_rows;
  int num_tiles;   // tiles for one key/value head
  int first_tile;  // backward: index of its first tile among the tiles of all tasks
  int q_map;
  int dout_map;
  Signal signal;
  RowView out;
  RowView lse;
  RowView delta;
  RowView dq;
  float* max_logits;  // of the group's query heads; null where nobody asks
};

/// Where the gradients of some rows of keys go.
struct RunEntry {
  int begin;
  int end;
  DType dtype;
  int is_added;  // 1: to what is there
  RowView dk;
  RowView dv;
};

/// A work item. Forward: a tile of a task. Backward: a block of keys of a group, seen by tasks [task, task_end).
struct WorkItem {
  int group;
  int kv_head;
  int task;
  int task_end;
  int index;      // forward: tile of the task. Backward: block of the document
  int num_tiles;  // backward: tiles that see the block
  int remote;     // 1: waits for signals
  // Backward, where groups add to the same key gradients:
  int before_begin;  // the items that store just before this one: before[before_begin, before_end)
  int before_end;
  int is_awaited;  // 1: an item waits for this one
};

/// A tile whose sums of dq are stored as dq.
struct StoreItem {
  int task;
  int kv_head;
  int tile;
};

/// A Mask with 32-bit rows.
struct TileMask {
  int window;  // 0: none
  int full;
};

/// A DocumentMask with 32-bit rows.
struct GroupMask {
  TileMask mask;
  const RowRange* ranges;  // of bidirectional rows, ascending and disjoint
  int num_ranges;

  // The keys [first_key, end_key) that a row sees.
  DISTCA_INLINE int first_key(int row) const { return begin_of_window(row); }
  DISTCA_INLINE int end_key(int row, int kv_end) const {
    if (mask.full) return end_of_window(row, kv_end);
    return num_ranges == 0 ? row + 1 : range_of(row).end;
  }
  // The rows [first_row, end_row) that see a key.
  DISTCA_INLINE int first_row(int key) const {
    if (mask.full) return begin_of_window(key);
    return num_ranges == 0 ? key : range_of(key).begin;
  }
  DISTCA_INLINE int end_row(int key, int length) const { return end_of_window(key, length); }

 private:
  // The first place within the window of `place`, and the end of those after it.
  DISTCA_INLINE int begin_of_window(int place) const {
    return mask.window == 0 ? 0 : maximum(0, place - mask.window + 1);
  }
  DISTCA_INLINE int end_of_window(int place, int length) const {
    return mask.window == 0 || place >= length - mask.window ? length : place + mask.window;
  }

  /// The rows that see each other and this one: at least the row itself.
  DISTCA_INLINE RowRange range_of(int row) const {
    int low = 0;  // the first one that ends after the row
    for (int n = num_ranges; n > 0;) {
      const int half = n / 2;
      if (ranges[low + half].end <= row) {
        low += half + 1;
        n -= half + 1;
      } else {
        n = half;
      }
    }
    return low < num_ranges && ranges[low].begin <= row ? ranges[low] : RowRange{row, row + 1};
  }
};

/// How scores become exponents of two: exponent = exponent_scale * f(q k). f(x) is sign * x or, with a cap, cap *
/// tanh(cap_scale * x).
struct ScoreMap {
  float exponent_scale;  // > 0
  float sign;            // 1, -1 or 0
  float cap;             // 0: none
  float cap_scale;
};

/// How a number is taken into a maximum that threads share: the larger one of signed words is kept, or the smaller one
/// of unsigned words. NaN is above all numbers, 0 above -0.
struct MaximumWord {
  uint32_t word;
  bool is_signed;
};

DISTCA_INLINE MaximumWord maximum_word(float value) {
  value += 0.f;
  uint32_t word = 0x7fffffffu;  // NaN without a sign
  if (value == value) std::memcpy(&word, &value, sizeof(word));
  // Words of numbers without a sign ascend with them, words of the others descend.
  return {word, word <= 0x7fffffffu};
}

/// The Scores of some groups.
struct ScoreEntry {
  TileMask mask;
  ScoreMap map;
  float scale;
};

/// The score that a mapped one stands for, which is f of ScoreMap.
DISTCA_INLINE float score_of(const ScoreEntry& entry, float mapped) {
  if (entry.map.cap != 0.f) return mapped;
  return entry.scale < 0.f ? -entry.scale * mapped : entry.scale * mapped;
}

/// The arguments of a kernel. They lie in constant memory, which is also read by an index that a thread computes.
struct KernelParams {
  const uint64_t* counts;  // numbers of items and of store_items
  const WorkItem* items;
  const StoreItem* store_items;
  const TaskEntry* tasks;
  const GroupEntry* groups;
  const RunEntry* runs;
  const int* before;  // backward: items that others wait for (WorkItem)
  const RowRange* bidirectional;
  const int64_t* blocks;
  const TensorMap* maps;
  int* next_item;  // how many items have been taken
  float* dq_sums;  // backward: sums of dq, in the order of the accumulators' registers (hopper_backward.h)
  int* turns;      // deterministic: key blocks that have added to each part of a tile of dq_sums; otherwise null
  int* stored;     // backward: of each item, whether each of the two warpgroups has stored its key gradients
  int dim;
  int v_dim;
  int group_heads;
  int tile_tokens;
  ScoreEntry scores[kMostScores];  // zeros past the problem's last one
  int pass;  // backward: which part of the columns of dq, dk and dv is computed (BackwardConfig::kPasses)

  DISTCA_INLINE int num_items() const { return static_cast<int>(counts[0]); }
  DISTCA_INLINE int num_store_items() const { return static_cast<int>(counts[1]); }
  DISTCA_INLINE int tile_rows() const { return tile_tokens * group_heads; }
  DISTCA_INLINE const ScoreEntry& scores_of(const GroupEntry& group) const { return scores[group.scores]; }
  DISTCA_INLINE GroupMask mask_of(const GroupEntry& group) const {
    return {scores_of(group).mask, bidirectional + group.bidirectional_begin,
            group.bidirectional_end - group.bidirectional_begin};
  }
};

/// The query rows of a tile, in the document.
DISTCA_INLINE RowRange tile_tokens(const KernelParams& p, const TaskEntry& task, int tile) {
  const int begin = tile * p.tile_tokens;
  return {task.q_begin + begin, task.q_begin + minimum(begin + p.tile_tokens, task.num_rows)};
}

/// The keys that some query row of `rows` sees.
DISTCA_INLINE RowRange visible_keys(const GroupMask& mask, RowRange rows, const GroupEntry& group) {
  return {maximum(mask.first_key(rows.begin), group.kv_begin),
          minimum(mask.end_key(rows.end - 1, group.kv_end), group.kv_end)};
}

/// The keys that every row of `rows` sees; the range may be empty.
DISTCA_INLINE RowRange keys_of_all(const GroupMask& mask, RowRange rows, const GroupEntry& group) {
  return {maximum(mask.first_key(rows.end - 1), group.kv_begin),
          minimum(mask.end_key(rows.begin, group.kv_end), group.kv_end)};
}

/// The rows of a task that see some of the keys [begin, end), which are not empty.
DISTCA_INLINE RowRange rows_that_see(const GroupMask& mask, const TaskEntry& task, int begin, int end) {
  return {maximum(task.q_begin, mask.first_row(begin)), mask.end_row(end - 1, task.q_begin + task.num_rows)};
}

/// The tiles of a task that have such rows; begin >= end if there are none.
DISTCA_INLINE RowRange tiles_that_see(const KernelParams& p, const GroupEntry& group, const TaskEntry& task, int begin,
                                      int end) {
  const RowRange rows = rows_that_see(p.mask_of(group), task, begin, end);
  if (rows.begin >= rows.end) return {0, 0};
  return {(rows.begin - task.q_begin) / p.tile_tokens, ceil_div(rows.end - task.q_begin, p.tile_tokens)};
}

/// Forward: a tile's rows and the keys that they see.
struct ForwardTile {
  RowRange rows;
  RowRange keys;
  RowRange keys_of_all;  // those that every row sees
  int begin_block;
  int end_block;
  int scores;  // the group's
};

/// The tile of an item. Blocks have `block_keys` keys.
DISTCA_INLINE ForwardTile forward_tile(const KernelParams& p, const WorkItem& item, int block_keys) {
  const RowRange rows = tile_tokens(p, p.tasks[item.task], item.index);
  const GroupEntry& group = p.groups[item.group];
  const GroupMask mask = p.mask_of(group);
  const RowRange keys = visible_keys(mask, rows, group);
  return {rows,        keys, keys_of_all(mask, rows, group), keys.begin / block_keys, ceil_div(keys.end, block_keys),
          group.scores};
}

/// The document rows of a block's keys that are there.
DISTCA_INLINE RowRange key_rows(const GroupEntry& group, int block, int block_keys) {
  return {maximum(block * block_keys, group.kv_begin), minimum((block + 1) * block_keys, group.kv_end)};
}

/// Where document row `block * kTableRows` lies: the row of its source, and the source.
struct BlockPlace {
  int row;
  int source;
};

DISTCA_INLINE std::byte* address(const RowView& view, int64_t row, int64_t head) {
  return view.data + row * view.row_stride + head * view.head_stride;
}

/// The index of a tile among the tiles of all tasks.
DISTCA_INLINE int tile_index(const TaskEntry& task, int kv_head, int tile) {
  return task.first_tile + kv_head * task.num_tiles + tile;
}

}  // namespace distca::attention::cuda
