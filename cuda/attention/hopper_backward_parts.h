// Backward of core attention: shared memory and the producer. The consumers come after it (hopper_consumer.h).
#pragma once

#include <type_traits>

#include "attention/hopper_parts.h"

namespace distca::attention::cuda {

/// The facts of a tile that its consumers need; they know nothing of tasks. Scores are mapped, masked or neither;
/// mapped ones are masked too.
template <int kRows>
struct TileFacts {
  float lse[kRows];  // in powers of two; inf where a row has no probabilities
  float delta[kRows];
  RowRange visible[kRows];  // keys that each row sees, counted from the item's block
  float* dq_sums;
  int* turns;            // null if adds come in any order
  int blocks_before;     // number of blocks before the item's that add to the tile's dq
  float exponent_scale;  // the group's
  enum Kind : int { kPlain, kMasked, kMapped } kind;
  int scores;  // the group's
};

/// The facts of a tile that are about its dq, for a warpgroup that has released the tile.
struct DqFacts {
  float* dq_sums;
  int* turns;
  int blocks_before;
};

/// What the producer knows of an item and of one of its tasks. It has read that once, because memory takes long to
/// answer; registers are scarce.
struct KnownItem {
  GroupEntry group;
  int kv_head;
  int block;  // of the document: its number, and its first row
  int begin;
  // the task
  int q_begin;
  int num_rows;
  int first_tile;  // of this head
  const TensorMap* q_map;
  const TensorMap* dout_map;
  RowView lse;
  RowView delta;
};

/// What a warpgroup has computed for a part of a tile's dq, on its way to the sums in memory.
template <int kElements>
struct alignas(128) DqPart {
  float elements[kElements];
  float* sums;
  int* turn;  // null if adds come in any order
  int blocks_before;
};

/// Parts are numbered, tile by tile, and take turns.
template <int kElements>
struct DqParts {
  DqPart<kElements> parts[2];
  Stages<2> stages;
};
struct NoDqParts {};

template <class Element_, int kDim_, int kValueDim_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kValueDim = kValueDim_;
  /// Sums for keys and for values of 64 keys can be too many registers for one warpgroup. Then each has one of the two.
  static constexpr bool kWide = kDim > 128 || kValueDim > 128;
  /// Beyond 256 columns they are too many even so. Then the kernel runs once for each half of the columns of dq, dk and
  /// dv (KernelParams::pass), and computes P and dP each time. Keys, values and one tile of 32 rows fill shared memory.
  static constexpr int kPasses = maximum(kDim, kValueDim) > 256 ? 2 : 1;
  static constexpr int kColumns = kDim / kPasses, kValueColumns = kValueDim / kPasses;
  /// This is part of the numerics, as in forward.
  static constexpr int kKeys = kWide ? 64 : 128;
  static constexpr int kRows = kPasses == 1 ? 64 : 32;
  static constexpr int kStages = kPasses == 1 ? 2 : 1;
  /// Sums of dq come in parts of a tile's rows and 64 columns. So many threads of a warpgroup have some of them.
  static constexpr int kParts = kDim / kBoxColumns, kPartsOfPass = kParts / kPasses;
  static constexpr int kPartElements = kRows * kBoxColumns, kPartThreads = 2 * kRows;
  using Parts = DqParts<kPartElements>;
  static constexpr int kOperandBytes =
      2 * (kKeys + kStages * kRows) * (kDim + kValueDim) + 2 * kStages * kKeys * kBoxColumns;
  /// Whether warps of their own add the parts of dq. Otherwise there is no room for the parts on their way.
  static constexpr bool kHandsOver = kOperandBytes + sizeof(Parts) <= 222 * 1024;
  static_assert(kHandsOver || kPasses == 1, "passes would share a tile's turn");
  /// Whether the warpgroup of dv and dq releases a tile before it multiplies dq, so that the only stage is filled then.
  static constexpr bool kReleasesEarly = kWide && kStages == 1;
  /// Parts of a tile that have turns of their own.
  static constexpr int kTurnsPerTile = kHandsOver ? kParts : 1;

  struct alignas(1024) Shared {
    SharedTile<kDim / kBoxColumns, kKeys> k;
    SharedTile<kValueDim / kBoxColumns, kKeys> v;
    SharedTile<kDim / kBoxColumns, kRows> q[kStages];
    SharedTile<kValueDim / kBoxColumns, kRows> dout[kStages];
    /// dS of a tile, with one row for each key. Columns past the tile's rows are anything.
    SharedTile<1, kKeys> dscores[kStages];
    std::conditional_t<kHandsOver, Parts, NoDqParts> dq;
    TileFacts<kRows> facts[kStages];
    KnownItem known;
    Stages<1> key_stages;
    Stages<kStages> tile_stages;
    hopper::Barrier loaded;
    ItemRing items;
    uint32_t nowhere;  // see stay_behind
  };
};

template <class Config>
struct BackwardProducer {
  static constexpr int kStages = Config::kStages, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kChunks = Config::kDim / kBoxColumns, kValueChunks = Config::kValueDim / kBoxColumns;

  const KernelParams& p;
  typename Config::Shared& s;
  Ring<2> items;
  Ring<1> keys;
  Ring<kStages> tiles;
  int loaded_parity = 0;

  DISTCA_DEVICE void run() {
    for (int index; (index = take_item(p, s.items, items)) < p.num_items();) {
      const WorkItem& item = p.items[index];
      if (lane_of_warp() == 0) {
        s.known.group = p.groups[item.group];
        s.known.kv_head = item.kv_head;
        s.known.block = item.index;
        s.known.begin = item.index * kKeys;
      }
      hopper::sync_warp();
      const RowRange rows = key_rows(s.known.group, s.known.block, kKeys);
      load_keys(rows);
      // From the last tile on, which all blocks of a document see: their CTAs then load the same tiles at about the
      // same time, and one that waits for its turn at a tile waits for another that is there.
#pragma unroll 1
      for (int t = item.task_end - 1; t >= item.task; --t) {
        const RowRange seeing = tiles_that_see(p, s.known.group, p.tasks[t], rows.begin, rows.end);
        if (seeing.begin >= seeing.end) continue;
        begin_task(p.tasks[t]);
#pragma unroll 1
        for (int tile = seeing.end - 1; tile >= seeing.begin; --tile) load_tile(tile);
      }
    }
  }

  DISTCA_DEVICE void begin_task(const TaskEntry& task) {
    hopper::sync_warp();  // all lanes are done with the one before
    if (lane_of_warp() == 0) {
      s.known.q_begin = task.q_begin;
      s.known.num_rows = task.num_rows;
      s.known.first_tile = tile_index(task, s.known.kv_head, 0);
      s.known.q_map = p.maps + task.q_map;
      s.known.dout_map = p.maps + task.dout_map;
      s.known.lse = task.lse;
      s.known.delta = task.delta;
      hopper::acquire_map(s.known.q_map);
      hopper::acquire_map(s.known.dout_map);
    }
    hopper::sync_warp();
  }

  DISTCA_DEVICE void load_keys(RowRange rows) {
    const KnownItem& known = s.known;
    const TensorMap* maps = p.maps + known.group.k_maps;
    BlockTable table;
    table.set(p, known.group);
    await_empty(s.key_stages.empty[0], keys.parity());
    if (lane_of_warp() == 0)
      for (int i = 0; i < kMapsOfGroup; ++i) hopper::acquire_map(maps + i);
    hopper::Barrier& full = s.key_stages.full[0];
    KeyBlock<kChunks, kKeys>{s.k, full, s.loaded}.load(maps, table, known.kv_head, known.begin, rows, true,
                                                       loaded_parity);
    KeyBlock<kValueChunks, kKeys>{s.v, full, s.loaded}.load(maps + kMapsOfKeys, table, known.kv_head, known.begin, rows,
                                                            true, loaded_parity);
    keys.advance();
  }

  /// What a lane knows of one row of a tile.
  struct RowFacts {
    float lse;
    float delta;
    RowRange visible;
  };

  /// Loads a tile: the copy engine brings q and dout, the lanes bring what is one number for each row. They read it
  /// before the stage is empty.
  DISTCA_DEVICE void load_tile(int tile) {
    const KnownItem& known = s.known;
    const int stage = tiles.stage();
    hopper::Barrier& full = s.tile_stages.full[stage];
    const int begin = tile * p.tile_tokens;
    const RowRange tokens{known.q_begin + begin, known.q_begin + minimum(begin + p.tile_tokens, known.num_rows)};
    RowFacts rows[kRows / kWarp];
#pragma unroll
    for (int i = 0; i < kRows / kWarp; ++i) rows[i] = read_row(tokens, lane_of_warp() + i * kWarp);
    await_empty(s.tile_stages.empty[stage], tiles.parity());
    if (lane_of_warp() == 0) {
      full.expect_bytes(query_bytes<kChunks>(p) + query_bytes<kValueChunks>(p));
      load_queries<kChunks, kRows>(p, known.q_map, known.kv_head, tile, full, s.q[stage]);
      load_queries<kValueChunks, kRows>(p, known.dout_map, known.kv_head, tile, full, s.dout[stage]);
    }
    TileFacts<kRows>& facts = s.facts[stage];
#pragma unroll
    for (int i = 0; i < kRows / kWarp; ++i) {
      const int row = lane_of_warp() + i * kWarp;
      facts.lse[row] = rows[i].lse;
      facts.delta[row] = rows[i].delta;
      facts.visible[row] = rows[i].visible;
    }
    if (lane_of_warp() == 0) {
      const GroupMask mask = p.mask_of(known.group);
      const RowRange of_all = keys_of_all(mask, tokens, known.group);
      const int index = known.first_tile + tile;
      facts.dq_sums = p.dq_sums + int64_t{index} * Config::kParts * Config::kPartElements;
      facts.turns = p.turns == nullptr ? nullptr : p.turns + int64_t{index} * Config::kTurnsPerTile;
      facts.blocks_before = known.block - visible_keys(mask, tokens, known.group).begin / kKeys;
      const bool masked = known.begin < of_all.begin || known.begin + kKeys > of_all.end;
      const ScoreMap& map = p.scores_of(known.group).map;
      facts.kind = maps_scores(map) ? facts.kMapped : masked ? facts.kMasked : facts.kPlain;
      facts.exponent_scale = map.exponent_scale;
      facts.scores = known.group.scores;
    }
    full.arrive();
    tiles.advance();
  }

  DISTCA_DEVICE RowFacts read_row(RowRange tokens, int row) const {
    const KnownItem& known = s.known;
    constexpr float kLog2E = 1.4426950408889634f;
    const int token = tokens.begin + row / p.group_heads;
    RowFacts facts{kInfinity, 0.f, {0, 0}};
    if (token >= tokens.end) return facts;
    const int head = known.kv_head * p.group_heads + row % p.group_heads;
    const float lse = *reinterpret_cast<const float*>(address(known.lse, token - known.q_begin, head)) * kLog2E;
    if (lse != -kInfinity) facts.lse = lse;
    facts.delta = *reinterpret_cast<const float*>(address(known.delta, token - known.q_begin, head));
    const GroupMask mask = p.mask_of(known.group);
    facts.visible = {mask.first_key(token) - known.begin, mask.end_key(token, known.group.kv_end) - known.begin};
    return facts;
  }
};

/// The warp that adds every other part of dq to the sums in memory. The copy engine does the work. Consumers wait for a
/// turn only where their part before the last one has not had its own.
template <class Config>
struct DqAdder {
  const KernelParams& p;
  typename Config::Shared& s;
  uint32_t first;  // part
  Ring<2> items;
  Ring<1> parts;

  DISTCA_DEVICE void run() {
    uint32_t part = 0;  // it may wrap around, as in hand_over_queries()
    for (int index; (index = begin_item(s.items, items)) < p.num_items();) {
      hopper::sync_warp();  // all lanes have read it
      if (lane_of_warp() == 0)
        end_item(s.items, items);
      else
        items.advance();
#pragma unroll 1
      for (int n = p.items[index].num_tiles * Config::kPartsOfPass; n > 0; --n, ++part)
        if (part % 2 == first) add();
    }
    if (lane_of_warp() == 0) hopper::wait_added();
  }

  DISTCA_DEVICE void add() {
    s.dq.stages.full[first].wait(parts.parity());
    hopper::sync_warp();  // as in await_empty()
    if (lane_of_warp() == 0) {
      const auto& part = s.dq.parts[first];
      if (part.turn != nullptr) {
        while (hopper::load_acquire(part.turn) != part.blocks_before) hopper::pause();
        hopper::fence_all();
      }
      hopper::add_shared(part.sums, part.elements, Config::kPartElements);
      if (part.turn != nullptr) {
        hopper::wait_added();
        hopper::fence_gpu();
        hopper::store_release(part.turn, part.blocks_before + 1);
      } else {
        hopper::wait_read();
      }
      s.dq.stages.empty[first].arrive();
    }
    hopper::sync_warp();
    parts.advance();
  }
};

}  // namespace distca::attention::cuda
