// Backward of core attention over a work list, on products of warps (compute capability 8.0 and later). An item, what
// is computed of it, the order in which items add and the deterministic mode are those of hopper_backward.h.
//
// A warp has 16 of the block's keys. P^T and dS^T are in the registers that the products for dV and dK want. dS^T also
// goes through shared memory, for dQ, whose parts of 16 rows by 64 columns the warps share. Up to 192 columns a warp
// has both dk and dv of its keys. Beyond them these are too many registers: half of the warps have dk, and compute dS;
// the others have dv, and compute dQ. Beyond 256 columns the kernel runs twice, each time for half of the columns of
// dq, dk and dv (KernelParams::pass).
//
// A tile is one step, with two barriers of the whole CTA:
//   first   the tile's bytes have come, and all warps are done with the tile before. With two stages the copies of the
//           next tile begin
//   second  dS is in shared memory. With one stage all warps are done with q and dout, and the copies of the next tile
//           begin
// Thread 0 finds out two steps ahead which tile comes: Shared::tiles has four, of which one is written after the first
// barrier of a step, and read after that of the next one.
#pragma once

#include "attention/ampere_parts.h"

namespace distca::attention::cuda {

template <class Element_, int kDim_, int kValueDim_>
struct AmpereBackwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kMostColumns = maximum(kDim, kValueDim);
  static constexpr bool kWide = kMostColumns > 192;
  static constexpr int kPasses = kMostColumns > 256 ? 2 : 1;
  static constexpr int kColumns = kDim / kPasses, kValueColumns = kValueDim / kPasses;
  /// These are part of the numerics, as in forward.
  static constexpr int kKeys = kMostColumns <= 256 ? 64 : 32;
  static constexpr int kRows = kMostColumns <= 128 ? 64 : kMostColumns <= 192 ? 32 : 16;
  /// Stages of tiles. With one, all reads of it must come before the second barrier.
  static constexpr int kStages = kMostColumns > 128 && kMostColumns <= 256 ? 2 : 1;
  static constexpr int kKeyWarps = kKeys / 16, kWarps = kWide ? 2 * kKeyWarps : kKeyWarps;
  static constexpr int kThreads = kWarps * kWarp;
  /// Sums of dq come in parts of 16 rows and 64 columns, in the order of a warp's registers: 32 of each lane.
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kParts = kDim / kChunkColumns, kPartsOfPass = kParts / kPasses;
  static constexpr int kPartElements = kRows * kChunkColumns;  // of all rows
  static_assert(kPartsOfPass > 0);
  static constexpr int kTurnsPerTile = kPasses;

  /// What is known of a tile.
  struct Tile {
    int task;
    RowRange tokens;    // of the document
    int is_masked;      // whether some row does not see all of the block's keys
    int index;          // among the tiles of all tasks
    int blocks_before;  // number of blocks before the item's that add to the tile's dq
  };
  struct alignas(128) Shared {
    WarpTile<kDim / kChunkColumns, kKeys> k;
    WarpTile<kValueDim / kChunkColumns, kKeys> v;
    WarpTile<kDim / kChunkColumns, kRows> q[kStages];
    WarpTile<kValueDim / kChunkColumns, kRows> dout[kStages];
    uint16_t dscores[kKeys * kRows];  // dS^T, see gradient_at()
    float lse[kStages][kRows];
    float delta[kStages][kRows];
    uint32_t visible[kStages][kRows];  // where the tile is masked: keys of the block that each row sees (key_bits)
    TileRow rows[kRows];
    Tile tiles[4];
    // Where thread 0 is among the item's tiles.
    int next_task;
    int next_tile;  // below first_tile: none of this task is left
    int first_tile;
    int index;  // of the item
  };
  static_assert(sizeof(Shared) + alignof(Shared) <= kLeastSharedMemory);
};

/// Keys [begin, end) of a block of up to 64, as one word: the low half and the high one.
DISTCA_DEVICE uint32_t key_bits(int begin, int end, int block_keys) {
  begin = minimum(maximum(begin, 0), block_keys);
  return static_cast<uint32_t>(begin) | static_cast<uint32_t>(minimum(maximum(end, begin), block_keys)) << 16;
}
struct alignas(8) WordPair {
  uint32_t x, y;
};

/// What a warp computes of its keys.
enum class KeyRole { kBoth, kKeyGradients, kValueGradients };

template <class Config, KeyRole kRole>
struct AmpereBackward {
  using Element = typename Config::Element;
  static constexpr bool kHasKeys = kRole != KeyRole::kValueGradients, kHasValues = kRole != KeyRole::kKeyGradients;
  static constexpr int kDim = Config::kDim, kValueDim = Config::kValueDim;
  static constexpr int kKeys = Config::kKeys, kRows = Config::kRows, kStages = Config::kStages;
  static constexpr int kColumns = Config::kColumns, kValueColumns = Config::kValueColumns;
  static constexpr int kScores = kRows / 2;
  /// The warps that multiply dq.
  static constexpr int kAdders = Config::kKeyWarps, kFirstAdder = Config::kWarps - kAdders;
  enum NamedBarrier : int { kQueryTurn = 0 };
  /// Whether dK is multiplied before the second barrier of a step.
  static constexpr bool kMultipliesEarly = kStages == 1 || kHasValues;

  const KernelParams& p;
  typename Config::Shared& s;

  float dk[1][kHasKeys ? kColumns / 2 : 1];
  float dv[1][kHasValues ? kValueColumns / 2 : 1];

  DISTCA_DEVICE AmpereBackward(const KernelParams& params, typename Config::Shared& shared) : p(params), s(shared) {}

  static DISTCA_DEVICE int thread() { return gpu::thread_of_cta(); }
  static DISTCA_DEVICE int warp() { return thread() / kWarp; }
  /// The first of the warp's keys, in the block, and the first one of this thread.
  static DISTCA_DEVICE int first_key() { return warp() % Config::kKeyWarps * 16; }
  static DISTCA_DEVICE int first_key_of_thread() { return first_key() + lane_of_warp() / 4; }
  /// The first column of this thread's pairs: they are query rows 8 j + this and the next one.
  static DISTCA_DEVICE int first_row_of_thread() { return lane_of_warp() % 4 * 2; }
  DISTCA_DEVICE int pass() const { return Config::kPasses == 1 ? 0 : p.pass; }

  DISTCA_DEVICE void run() {
    number_rows(p, s.rows, Config::kThreads);
    for (int index; (index = take_item(p, &s.index, [](const WorkItem&) {})) < p.num_items();) {
      const WorkItem& item = p.items[index];
      await_signals(p, item, Config::kThreads);
      work(item, p.groups[item.group]);
      store(index, item);
    }
  }

  DISTCA_DEVICE void work(const WorkItem& item, const GroupEntry& group) {
    if (thread() == 0) {
      s.next_task = item.task_end;
      s.next_tile = -1;
      s.first_tile = 0;
      if (item.num_tiles > 0) find_tile(item, group, s.tiles[0]);
      if (item.num_tiles > 1) find_tile(item, group, s.tiles[1]);
    }
    copy_block(item, group);
    if constexpr (kHasKeys) clear(dk[0]);
    if constexpr (kHasValues) clear(dv[0]);
    gpu::sync_cta();
    copy_tile(item, group, 0);
#pragma unroll 1
    for (int i = 0; i < item.num_tiles; ++i) step(item, group, i);
    ampere::wait_copies<0>();  // of the keys, where no tile sees them
  }

  // ---- what is loaded

  /// Thread 0: the next tile that sees the item's keys. From the last one on, as in hopper_backward_parts.h.
  DISTCA_DEVICE void find_tile(const WorkItem& item, const GroupEntry& group, typename Config::Tile& tile) {
    const RowRange keys = key_rows(group, item.index, kKeys);
    while (s.next_tile < s.first_tile) {
      const RowRange seeing = tiles_that_see(p, group, p.tasks[--s.next_task], keys.begin, keys.end);
      s.first_tile = seeing.begin;
      s.next_tile = seeing.end - 1;
    }
    const TaskEntry& task = p.tasks[s.next_task];
    const GroupMask mask = p.mask_of(group);
    const RowRange tokens = tile_tokens(p, task, s.next_tile), of_all = keys_of_all(mask, tokens, group);
    const int begin = item.index * kKeys;
    tile = {s.next_task, tokens, begin < of_all.begin || begin + kKeys > of_all.end ? 1 : 0,
            tile_index(task, item.kv_head, s.next_tile--),
            item.index - visible_keys(mask, tokens, group).begin / kKeys};
  }

  DISTCA_DEVICE void copy_block(const WorkItem& item, const GroupEntry& group) {
    const RowRange rows = key_rows(group, item.index, kKeys);
    const int begin = item.index * kKeys;
    const BlockPlace place = place_of_keys(entry_of_keys(p, group, begin), begin);
    const RowRange needed{rows.begin - begin, rows.end - begin};
    const int map = group.k_maps + place.source;
    copy_keys<kDim / kChunkColumns, kKeys, Config::kThreads>(keys_of(p, map, item.kv_head), place.row, needed, 0, p.dim,
                                                             s.k);
    copy_keys<kValueDim / kChunkColumns, kKeys, Config::kThreads>(keys_of(p, map + kMapsOfKeys, item.kv_head),
                                                                  place.row, needed, 0, p.v_dim, s.v);
    ampere::end_copies();
  }

  /// Starts copying the item's tile number i, if it has so many.
  DISTCA_DEVICE void copy_tile(const WorkItem& item, const GroupEntry& group, int i) {
    if (i < item.num_tiles) {
      const typename Config::Tile& tile = s.tiles[i % 4];
      const TaskEntry& task = p.tasks[tile.task];
      const int stage = i % kStages, first = tile.tokens.begin - task.q_begin,
                first_head = item.kv_head * p.group_heads;
      const int num_tokens = tile.tokens.end - tile.tokens.begin;
      copy_queries<kDim / kChunkColumns, kRows, Config::kThreads>(map_of(p, task.q_map), first_head, first, num_tokens,
                                                                  p.dim, s.rows, s.q[stage]);
      copy_queries<kValueDim / kChunkColumns, kRows, Config::kThreads>(map_of(p, task.dout_map), first_head, first,
                                                                       num_tokens, p.v_dim, s.rows, s.dout[stage]);
      if (const int row = thread(); row < kRows) {
        // What is past the tile's tokens becomes zero: there P is 1, and dout and dS are 0.
        const TileRow at = s.rows[row];
        const bool valid = at.token < num_tokens;
        const int from = valid ? first + at.token : 0, head = first_head + at.head;
        ampere::copy4(ampere::place_of(&s.lse[stage][row]), address(task.lse, from, head), valid);
        ampere::copy4(ampere::place_of(&s.delta[stage][row]), address(task.delta, from, head), valid);
        if (tile.is_masked != 0) {
          const GroupMask mask = p.mask_of(group);
          const int token = tile.tokens.begin + at.token, begin = item.index * kKeys;
          s.visible[stage][row] =
              valid ? key_bits(mask.first_key(token) - begin, mask.end_key(token, group.kv_end) - begin, kKeys) : 0;
        }
      }
    }
    ampere::end_copies();
  }

  // ---- what is computed

  DISTCA_DEVICE void step(const WorkItem& item, const GroupEntry& group, int i) {
    const int stage = i % kStages;
    ampere::wait_copies<0>();
    gpu::sync_cta();
    if (thread() == 0 && i + 2 < item.num_tiles) find_tile(item, group, s.tiles[(i + 2) % 4]);
    gpu::sync_warp();  // products need whole warps
    if constexpr (kStages > 1) copy_tile(item, group, i + 1);

    float scores[1][kScores];
    clear(scores[0]);
    multiply_transposed<Element, kDim, kKeys, kRows, kRows>(scores, matrices_at<Matrices::kRowsFirst>(s.k, first_key()),
                                                            matrices_at<Matrices::kColumnsFirst>(s.q[stage], 0));
    const ScoreEntry& entry = p.scores_of(group);
    const bool maps = maps_scores(entry.map);
    if (maps) map_scores(entry.map, scores[0]);
    uint32_t gradients[kRows / kStepColumns][1][4];
    if constexpr (kHasKeys) {
      float dscores[1][kScores];
      clear(dscores[0]);
      multiply_transposed<Element, kValueDim, kKeys, kRows, kRows>(
          dscores, matrices_at<Matrices::kRowsFirst>(s.v, first_key()),
          matrices_at<Matrices::kColumnsFirst>(s.dout[stage], 0));
      subtract_delta(stage, dscores[0]);
      if (maps) scale_by_slope(entry.map, scores[0], dscores[0]);
      exponentials(stage, s.tiles[i % 4].is_masked != 0, entry.map.exponent_scale, scores[0]);
#pragma unroll
      for (int j = 0; j < kScores; ++j) dscores[0][j] = gpu::product(scores[0][j], dscores[0][j]);
      pack(dscores[0], gradients);
      store_gradients(gradients);
    } else {
      exponentials(stage, s.tiles[i % 4].is_masked != 0, entry.map.exponent_scale, scores[0]);
    }
    if constexpr (kHasValues) {
      uint32_t probs[kRows / kStepColumns][1][4];
      pack(scores[0], probs);
      multiply_rows<Config::kValueColumns>(dv, probs, s.dout[stage][pass() * (kValueColumns / kChunkColumns)]);
    }
    if constexpr (kHasKeys && kMultipliesEarly) multiply_query_rows(stage, gradients);
    gpu::sync_cta();
    if constexpr (kStages == 1) copy_tile(item, group, i + 1);
    if constexpr (kHasKeys && !kMultipliesEarly) multiply_query_rows(stage, gradients);
    if constexpr (kHasValues) add_queries(s.tiles[i % 4]);
  }

  /// dK += dS^T Q.
  DISTCA_DEVICE void multiply_query_rows(int stage, const uint32_t (&gradients)[kRows / kStepColumns][1][4]) {
    multiply_rows<Config::kColumns>(dk, gradients, s.q[stage][pass() * (kColumns / kChunkColumns)]);
  }

  /// sums += left * the rows of a tile.
  template <int kOfRight, int kSums>
  static DISTCA_DEVICE void multiply_rows(float (&sums)[1][kSums], const uint32_t (&left)[kRows / kStepColumns][1][4],
                                          const void* right) {
    static_assert(kSums == kOfRight / 2);
    const ampere::Place at = matrices_at<Matrices::kRowsFirst>(right, 0);
#pragma unroll
    for (int k = 0; k < kRows / kStepColumns; ++k)
      multiply_step<Element, kRows, kOfRight>(sums, left[k], at + k * kStepColumns * kChunkRowBytes);
  }

  static DISTCA_DEVICE void pack(const float (&sums)[kScores], uint32_t (&words)[kRows / kStepColumns][1][4]) {
#pragma unroll
    for (int j = 0; j < kScores; j += 2) words[j / 8][0][j % 8 / 2] = gpu::pack<Element>(sums[j], sums[j + 1]);
  }

  DISTCA_DEVICE void subtract_delta(int stage, float (&dprobs)[kScores]) const {
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
      const FloatPair delta = pair_of(s.delta[stage], first_row_of_thread() + j * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) dprobs[j + e] -= e % 2 == 0 ? delta.x : delta.y;
    }
  }
  DISTCA_DEVICE void exponentials(int stage, bool is_masked, float exponent_scale, float (&scores)[kScores]) const {
    constexpr float kLog2E = 1.4426950408889634f;
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
      FloatPair lse = pair_of(s.lse[stage], first_row_of_thread() + j * 2);
      // A row without probabilities has none here either.
      lse.x = lse.x == -kInfinity ? kInfinity : gpu::product(lse.x, kLog2E);
      lse.y = lse.y == -kInfinity ? kInfinity : gpu::product(lse.y, kLog2E);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        scores[j + e] = gpu::exp2_fast(gpu::fused(scores[j + e], exponent_scale, e % 2 == 0 ? -lse.x : -lse.y));
    }
    if (!is_masked) return;
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
      const WordPair rows = *reinterpret_cast<const WordPair*>(&s.visible[stage][first_row_of_thread() + j * 2]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first_key_of_thread() + e / 2 * 8;
        const uint32_t visible = e % 2 == 0 ? rows.x : rows.y;
        if (key < static_cast<int>(visible & 0xffff) || key >= static_cast<int>(visible >> 16)) scores[j + e] = 0.f;
      }
    }
  }
  /// What two neighbouring rows have; the first is even.
  static DISTCA_DEVICE FloatPair pair_of(const float (&of_rows)[kRows], int row) {
    return *reinterpret_cast<const FloatPair*>(&of_rows[row]);
  }

  // ---- dS in shared memory: a row for each key, in pieces of 8 query rows

  static constexpr int kPieces = kRows / kPieceColumns;
  /// Where a piece of a key's row is, in bytes. Eight keys' pieces of one number lie in different banks.
  static DISTCA_DEVICE int gradient_at(int key, int piece) {
    return key * (kRows * 2) + (piece ^ (key / (8 / kPieces) % kPieces)) * kPieceBytes;
  }
  DISTCA_DEVICE void store_gradients(const uint32_t (&gradients)[kRows / kStepColumns][1][4]) {
    const ampere::Place at = ampere::place_of(s.dscores) + first_row_of_thread() * 2;
#pragma unroll
    for (int j = 0; j < kScores; j += 2)
      ampere::store_shared(at + gradient_at(first_key_of_thread() + j / 2 % 2 * 8, j / 4),
                           gradients[j / 8][0][j % 8 / 2]);
  }

  // ---- dq

  /// dQ += dS K, of the tile's parts that are this warp's.
  DISTCA_DEVICE void add_queries(const typename Config::Tile& tile) {
    static_assert(kAdders % Config::kRowTiles == 0 && kAdders / Config::kRowTiles <= Config::kPartsOfPass);
    constexpr int kTogether = kAdders / Config::kRowTiles;  // parts of the same rows that warps multiply at a time
    const int adder = warp() - kFirstAdder, row_tile = adder % Config::kRowTiles, lane = lane_of_warp();
    int* turn = p.turns == nullptr ? nullptr : p.turns + tile.index * Config::kTurnsPerTile + pass();
    float* sums = p.dq_sums + int64_t{tile.index} * Config::kParts * Config::kPartElements +
                  row_tile * (16 * kChunkColumns) + lane;
#pragma unroll 1
    for (int i = adder / Config::kRowTiles; i < Config::kPartsOfPass; i += kTogether) {
      const int part = pass() * Config::kPartsOfPass + i;
      float dq[1][kChunkColumns / 2];
      clear(dq[0]);
      const ampere::Place keys = matrices_at<Matrices::kRowsFirst>(s.k[part], 0);
#pragma unroll
      for (int k = 0; k < kKeys / kStepColumns; ++k) {
        // dS is transposed: its keys are the rows of this tile.
        const int key = k * kStepColumns + lane % 8 + lane / 16 * 8;
        uint32_t left[1][4];
        ampere::load_transposed(left[0], ampere::place_of(s.dscores) + gradient_at(key, row_tile * 2 + lane / 8 % 2));
        multiply_step<Element, kKeys, kChunkColumns>(dq, left, keys + k * kStepColumns * kChunkRowBytes);
      }
      if (turn != nullptr && i < kTogether) await_turn(turn, tile.blocks_before);
      float* to = sums + part * Config::kPartElements;
#pragma unroll
      for (int j = 0; j < kChunkColumns / 2; ++j) gpu::add_global(to + j * kWarp, dq[0][j]);
    }
    if (turn == nullptr) return;
    ampere::sync_named(kQueryTurn, kAdders * kWarp);
    if (adder == 0 && lane == 0) {
      gpu::fence_gpu();  // for all that the barrier has put before it
      gpu::store_release(turn, tile.blocks_before + 1);
    }
    gpu::sync_warp();
  }

  DISTCA_DEVICE void await_turn(const int* turn, int blocks_before) const {
    if (warp() == kFirstAdder && lane_of_warp() == 0) gpu::await_word(turn, blocks_before);
    gpu::sync_warp();
    ampere::sync_named(kQueryTurn, kAdders * kWarp);
  }

  // ---- dk and dv

  /// Stores the pass's columns, once the items that store before this one have. The two words of an item, which say
  /// that it has, are written together here.
  DISTCA_DEVICE void store(int index, const WorkItem& item) {
    if (item.before_begin != item.before_end) {
      for (int i = 2 * item.before_begin + thread(); i < 2 * item.before_end; i += Config::kThreads)
        gpu::await_word(p.stored + 2 * p.before[i / 2] + i % 2, 1);
      gpu::sync_cta();
    }
    const auto key = [&] { return item.index * kKeys + first_key_of_thread(); };
    if constexpr (kHasKeys) {
      const float scale = p.scores_of(p.groups[item.group]).scale;
      store_key<Element, 0>(p, item, key, dk[0], scale, pass() * kColumns, p.dim, &RunEntry::dk);
      store_key<Element, 1>(p, item, key, dk[0], scale, pass() * kColumns, p.dim, &RunEntry::dk);
    }
    if constexpr (kHasValues) {
      store_key<Element, 0>(p, item, key, dv[0], 1.f, pass() * kValueColumns, p.v_dim, &RunEntry::dv);
      store_key<Element, 1>(p, item, key, dv[0], 1.f, pass() * kValueColumns, p.v_dim, &RunEntry::dv);
    }
    if (item.is_awaited == 0) return;
    gpu::sync_cta();
    if (thread() < 2) {
      gpu::fence_gpu();
      gpu::store_release(p.stored + 2 * index + thread(), 1);
    }
  }
};

/// The work of one CTA of Config::kThreads threads. Shared memory is uninitialised.
template <class Config>
DISTCA_DEVICE void ampere_backward_cta(const KernelParams& p, typename Config::Shared& s) {
  if constexpr (!Config::kWide)
    AmpereBackward<Config, KeyRole::kBoth>(p, s).run();
  else if (gpu::thread_of_cta() < Config::kKeyWarps * kWarp)
    AmpereBackward<Config, KeyRole::kKeyGradients>(p, s).run();
  else
    AmpereBackward<Config, KeyRole::kValueGradients>(p, s).run();
}

/// Stores the sums of dq of one tile, times the scale, as dq. Any number of threads of a CTA call it.
template <class Config>
DISTCA_DEVICE void ampere_store_queries(const KernelParams& p, const StoreItem& item, int first, int step) {
  const TaskEntry& task = p.tasks[item.task];
  const float scale = p.scores_of(p.groups[task.group]).scale;
  const int tokens = minimum(p.tile_tokens, task.num_rows - item.tile * p.tile_tokens);
  const float* sums =
      p.dq_sums + int64_t{tile_index(task, item.kv_head, item.tile)} * Config::kParts * Config::kPartElements;
  // Four lanes of a warp had eight columns of a row; one thread writes these.
  constexpr int kGroups = kChunkColumns / kPieceColumns;
  for (int i = first; i < Config::kParts * kGroups * Config::kRows; i += step) {
    const int row = i % Config::kRows, group = i / Config::kRows % kGroups, part = i / Config::kRows / kGroups;
    const int column = part * kChunkColumns + group * kPieceColumns, token = row / p.group_heads;
    if (column >= p.dim || token >= tokens) continue;
    const float* at = sums + part * Config::kPartElements + row / 16 * (16 * kChunkColumns) +
                      (4 * group + 2 * (row / 8 % 2)) * kWarp + row % 8 * 4;
    gpu::Words4 words;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words.x[j] = gpu::pack<typename Config::Element>(gpu::product(at[j], scale), gpu::product(at[kWarp + j], scale));
    const int head = item.kv_head * p.group_heads + row % p.group_heads;
    gpu::store_global(address(task.dq, item.tile * p.tile_tokens + token, head) + column * 2, words);
  }
}

}  // namespace distca::attention::cuda
