// The common parts of the CTAs of both passes. A CTA stays. Its producer warp takes one item of the work list after
// another, tells the consumers, and loads what they need, as far ahead as shared memory allows.
#pragma once

#include "attention/hopper.h"
#include "attention/row_parts.h"
#include "attention/tables.h"

namespace distca::attention::cuda {

inline constexpr int kWarpgroup = 128;
/// One warpgroup produces, with one warp of it, because the copy engine does the work; in backward two more add dq. Two
/// warpgroups consume.
inline constexpr int kConsumers = 2 * kWarpgroup;
inline constexpr int kThreads = kWarpgroup + kConsumers;
/// Registers of a thread. The CTA is launched with 168 for each; the warpgroup that produces gives most of its own
/// away.
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168);
/// Warps that report to a barrier that they are done with a stage.
inline constexpr int kConsumerWarps = kConsumers / kWarp;
inline constexpr int kBoxBytes = kTableRows * kBoxColumns * 2;
/// Bytes of a chunk's row, and elements of the inner dimension of one product.
inline constexpr int kRowBytes = kBoxColumns * 2;
inline constexpr int kInnerStep = 16;
/// Bytes between chunks of an operand whose columns are the inner dimension. The hardware ignores it, but CuTe sets it.
inline constexpr int kNoChunk = 16;

/// Named barriers.
enum NamedBarrier : int {
  kFirstTurn = 0,
  kSecondTurn = 1,
  kScoresWritten = 2,
  kQueryTurn = 3,
  kFirstStore = 4,
  kSecondStore = 5,
  kScoresRead = 6
};

/// A tile of 16-bit elements in the form that hopper.h wants.
template <int kChunks, int kRows>
using SharedTile = uint16_t[kChunks][kRows][kBoxColumns];

/// How often a ring of buffers has been used, in one register.
template <int kStages>
struct Ring {
  static_assert((kStages & (kStages - 1)) == 0);
  int uses = 0;
  DISTCA_DEVICE int stage() const { return uses % kStages; }
  DISTCA_DEVICE int parity() const { return uses / kStages % 2; }
  DISTCA_DEVICE void advance() { ++uses; }
};

/// The same for a number of stages that need not be a power of two.
template <int kStages>
struct AnyRing {
  int at = 0;  // the stage, plus kStages where the parity is 1
  DISTCA_DEVICE int stage() const { return at < kStages ? at : at - kStages; }
  DISTCA_DEVICE int parity() const { return at < kStages ? 0 : 1; }
  DISTCA_DEVICE void advance() { at = at + 1 == 2 * kStages ? 0 : at + 1; }
};

/// Barriers of a ring. full: the producer has filled the stage. empty: all consumer warps are done with it.
template <int kStages>
struct Stages {
  hopper::Barrier full[kStages];
  hopper::Barrier empty[kStages];

  DISTCA_DEVICE void init(int producers, int consumers) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumers);
    }
  }
};

/// The items of a CTA, on their way from its producer to its consumers.
struct ItemRing {
  Stages<2> stages;
  int index[2];
};

/// Every lane of the producer calls this: it waits until a stage is empty. No lane may fill the stage before all lanes
/// have seen that. Otherwise the consumers could be done with it again, and to a late lane the barrier would look as it
/// did at first.
DISTCA_DEVICE void await_empty(hopper::Barrier& empty, int parity) {
  empty.wait(parity ^ 1);
  hopper::sync_warp();
}

/// Every lane of the producer calls this: it waits until all rows of the item's tasks have come.
DISTCA_DEVICE void await_signals(const KernelParams& p, const WorkItem& item) {
  for (int t = item.task + lane_of_warp(); t < item.task_end; t += kWarp) {
    const Signal signal = p.tasks[t].signal;
    if (signal.word == nullptr) continue;
    while (hopper::load_signal(signal.word) < signal.value) hopper::pause();
  }
  hopper::sync_warp();
  hopper::fence_all();
}

/// Every lane of the producer calls this: it takes the next item and tells the consumers. Returns num_items at the end.
DISTCA_DEVICE int take_item(const KernelParams& p, ItemRing& items, Ring<2>& ring) {
  int index = lane_of_warp() == 0 ? hopper::fetch_add(p.next_item, 1) : 0;
  index = minimum(hopper::shuffle_from(index, 0), p.num_items());
  if (index < p.num_items() && p.items[index].remote != 0) await_signals(p, p.items[index]);
  await_empty(items.stages.empty[ring.stage()], ring.parity());
  if (lane_of_warp() == 0) {
    items.index[ring.stage()] = index;
    items.stages.full[ring.stage()].arrive();
  }
  hopper::sync_warp();
  ring.advance();
  return index;
}

/// Every consumer calls this: it returns the next item, which stays in shared memory and may be read again until
/// end_item().
DISTCA_DEVICE int begin_item(ItemRing& items, const Ring<2>& ring) {
  items.stages.full[ring.stage()].wait(ring.parity());
  hopper::sync_warp();  // products need whole warps
  return items.index[ring.stage()];
}
DISTCA_DEVICE int this_item(const ItemRing& items, const Ring<2>& ring) { return items.index[ring.stage()]; }
DISTCA_DEVICE void end_item(ItemRing& items, Ring<2>& ring) {
  items.stages.empty[ring.stage()].arrive();
  ring.advance();
}

/// Every consumer warp calls this once its products have read a stage.
DISTCA_DEVICE void release(hopper::Barrier& empty) {
  hopper::sync_warp();
  if (lane_of_warp() == 0) empty.arrive();
}

/// Zeroes rows [begin, end) of a tile. All lanes of a warp call it.
template <int kChunks, int kRows>
DISTCA_DEVICE void clear_rows(SharedTile<kChunks, kRows>& tile, int begin, int end) {
  constexpr int kPieces = kBoxColumns / 8;
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll 1
    for (int i = begin * kPieces + lane_of_warp(); i < end * kPieces; i += kWarp)
      hopper::store_shared(&tile[chunk][i / kPieces][i % kPieces * 8], hopper::Words4{});
}

/// Where the keys of a group lie. Each lane of the producer keeps one of 32 entries of the group's block table, because
/// memory takes long to answer.
struct BlockTable {
  const int64_t* entries = nullptr;
  int first = 0;  // the document block of the first entry, and the number of entries
  int number = 0;
  int loaded = 0;  // the entry that lane 0 has
  int64_t entry = 0;

  /// Every lane calls these.
  DISTCA_DEVICE void set(const KernelParams& p, const GroupEntry& group) {
    entries = p.blocks + group.blocks;
    first = group.first_block;
    number = ceil_div(group.kv_end, kTableRows) - first;
    loaded = -kWarp;
  }
  DISTCA_DEVICE BlockPlace place(int block) {
    const int index = block - first;
    if (index < loaded || index >= loaded + kWarp) {
      loaded = index;
      entry = index + lane_of_warp() < number ? entries[index + lane_of_warp()] : 0;
    }
    const int64_t found = hopper::shuffle_from(entry, index - loaded);
    return {static_cast<int>(found >> 1), static_cast<int>(found & 1)};
  }
};

/// Keys or values of document rows [begin, begin + kRows) of one head, of which rows `needed` are there. The other rows
/// become zero if `clear` asks for it, because memory may hold NaN there.
template <int kChunks, int kRows>
struct KeyBlock {
  SharedTile<kChunks, kRows>& tile;
  hopper::Barrier& full;
  /// Counts the bytes of a block that is cleared before `full` says that it is there. Only the producer waits for it.
  hopper::Barrier& loaded;

  /// Every lane of the producer calls this. `parity` is that of `loaded`.
  DISTCA_DEVICE void load(const TensorMap* maps, BlockTable& table, int kv_head, int begin, RowRange needed, bool clear,
                          int& parity) const {
    const int first = maximum(needed.begin - begin, 0), last = minimum(needed.end - begin, kRows);
    const bool partial = clear && (first > 0 || last < kRows);
    hopper::Barrier& target = partial ? loaded : full;
    const int first_box = first / kTableRows, end_box = ceil_div(last, kTableRows);
    if (lane_of_warp() == 0) target.expect_bytes((end_box - first_box) * kChunks * kBoxBytes);
#pragma unroll 1
    for (int box = first_box; box < end_box; ++box) {
      const BlockPlace place = table.place(begin / kTableRows + box);
      if (lane_of_warp() != 0) continue;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        hopper::load_box(maps + place.source, &target, &tile[chunk][box * kTableRows][0], chunk * kBoxColumns,
                         place.row, kv_head);
    }
    if (lane_of_warp() == 0) target.arrive();
    hopper::sync_warp();
    if (!partial) return;
    loaded.wait(parity);
    parity ^= 1;
    clear_rows<kChunks, kRows>(tile, 0, first);
    clear_rows<kChunks, kRows>(tile, last, kRows);
    hopper::fence_shared();
    hopper::sync_warp();
    if (lane_of_warp() == 0) full.arrive();
  }
};

/// One thread calls this: it loads a tile of query rows (or gradients of out) and reports the bytes to `full`, which
/// the caller tells to expect query_bytes(). Rows past the task's last row lie outside its map and become zero.
template <int kChunks, int kRows>
DISTCA_DEVICE void load_queries(const KernelParams& p, const TensorMap* map, int kv_head, int tile_of_task,
                                hopper::Barrier& full, SharedTile<kChunks, kRows>& tile) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk)
    hopper::load_box(map, &full, &tile[chunk][0][0], chunk * kBoxColumns, kv_head * p.group_heads,
                     tile_of_task * p.tile_tokens);
}
template <int kChunks>
DISTCA_DEVICE int query_bytes(const KernelParams& p) {
  return kChunks * kRowBytes * p.tile_rows();
}

}  // namespace distca::attention::cuda
