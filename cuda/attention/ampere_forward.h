// Forward of core attention over a work list, on products of warps (compute capability 8.0 and later). The numerics are
// those of hopper_forward.h, with tiles and blocks of other sizes.
//
// A warp has 16 or 32 rows of a tile, and goes over the blocks of keys that the tile sees, in ascending order. Scores,
// probabilities and out stay in its registers. Beyond 256 columns of values two warps share rows: both compute the
// scores, and each has half of out's columns.
//
// Keys and values go through a ring of stages, a part at a time: keys by columns, values by rows. A part is one step:
// its bytes have come (wait_copies), all threads know that and are done with the step before (sync_cta), the copies of
// a later step begin, which overwrite that one, and the warps multiply. Nothing else orders accesses to stages. The
// tile of queries is read in steps of keys alone; at least one step of values follows before the next tile is copied.
#pragma once

#include "attention/ampere_parts.h"

namespace distca::attention::cuda {

/// What the threads of a CTA need to know of an item.
struct ForwardItem {
  ForwardTile tile;
  HeadRows k[2];  // of its head, in both sources
  HeadRows v[2];
};

template <class Element_, int kDim_, int kValueDim_>
struct AmpereForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // like kValueDim rounded up to whole chunks; columns beyond the head are zero
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kMostColumns = maximum(kDim, kValueDim);
  /// These are part of the numerics: blocks start at multiples of kKeys.
  static constexpr int kRows = kMostColumns <= 256 ? 128 : 32;
  static constexpr int kKeys = kMostColumns > 192 && kMostColumns <= 256 ? 32 : 64;
  static constexpr int kWarps = kMostColumns > 128 && kMostColumns <= 256 ? 8 : 4;
  static constexpr int kThreads = kWarps * kWarp;
  /// Warps that share rows, the columns of out that each has, and how often 16 rows each has.
  static constexpr int kColumnWarps = kValueDim > 256 ? 2 : 1;
  static constexpr int kOutColumns = kValueDim / kColumnWarps;
  static constexpr int kRowTiles = kRows / 16 / (kWarps / kColumnWarps);
  /// Steps for the keys and for the values of a block.
  static constexpr int kKeySteps = ceil_div(kDim, 256), kValueSteps = ceil_div(kValueDim, 256);
  static constexpr int kStages = 2;

  using QueryTile = WarpTile<kDim / kChunkColumns, kRows>;
  using KeyTile = WarpTile<kDim / kKeySteps / kChunkColumns, kKeys>;
  using ValueTile = WarpTile<kValueDim / kChunkColumns, kKeys / kValueSteps>;
  union Stage {
    KeyTile k;
    ValueTile v;
  };
  struct alignas(128) Shared {
    QueryTile q;
    Stage stages[kStages];
    TileRow rows[kRows];
    RowRange visible[kRows];  // keys that each row sees. A thread reads what it has written itself
    ForwardItem items[2];     // this item and the next one, which thread 0 may be at already
    int index;                // of the item
  };
  static_assert(sizeof(Shared) + alignof(Shared) <= kLeastSharedMemory);
};

template <class Config>
struct AmpereForward {
  using Element = typename Config::Element;
  static constexpr int kKeys = Config::kKeys, kOutColumns = Config::kOutColumns, kRowTiles = Config::kRowTiles;
  static constexpr int kKeySteps = Config::kKeySteps, kValueSteps = Config::kValueSteps;
  static constexpr int kKeysOfStep = kKeys / kValueSteps;  // of values

  const KernelParams& p;
  typename Config::Shared& s;

  float scores[kRowTiles][kKeys / 2];
  float out[kRowTiles][kOutColumns / 2];
  SoftmaxRows softmax[kRowTiles];

  // Steps that have begun, in the CTA's life and before this item, and the entry of the block that is copied next.
  int steps = 0;
  int steps_before = 0;
  int64_t entry = 0;

  DISTCA_DEVICE AmpereForward(const KernelParams& params, typename Config::Shared& shared) : p(params), s(shared) {}

  static DISTCA_DEVICE int warp() { return gpu::thread_of_cta() / kWarp; }
  /// The first of the warp's rows, in the tile, and the first of its columns of out.
  static DISTCA_DEVICE int first_row() { return warp() / Config::kColumnWarps * kRowTiles * 16; }
  static DISTCA_DEVICE int first_column() { return warp() % Config::kColumnWarps * kOutColumns; }

  DISTCA_DEVICE void run() {
    number_rows(p, s.rows, Config::kThreads);
    for (int number = 0;; number ^= 1) {
      ForwardItem& known = s.items[number];
      const int index = take_item(p, &s.index, [&](const WorkItem& item) { begin(item, known); });
      if (index == p.num_items()) return;
      await_signals(p, p.items[index], Config::kThreads);
      work(p.items[index], known);
    }
  }

  DISTCA_DEVICE void begin(const WorkItem& item, ForwardItem& known) const {
    known.tile = forward_tile(p, item, kKeys);
    const int maps = p.groups[item.group].k_maps;
#pragma unroll
    for (int source = 0; source < 2; ++source) {
      known.k[source] = keys_of(p, maps + source, item.kv_head);
      known.v[source] = keys_of(p, maps + kMapsOfKeys + source, item.kv_head);
    }
  }

  DISTCA_DEVICE void work(const WorkItem& item, const ForwardItem& known) {
    const ForwardTile& tile = known.tile;
    const GroupEntry& group = p.groups[item.group];
    const TaskEntry& task = p.tasks[item.task];
    steps_before = steps;
    entry = entry_of_keys(p, group, tile.begin_block * kKeys);
    copy_queries<Config::kDim / kChunkColumns, Config::kRows, Config::kThreads>(
        map_of(p, task.q_map), item.kv_head * p.group_heads, tile.rows.begin - task.q_begin,
        tile.rows.end - tile.rows.begin, p.dim, s.rows, s.q);
#pragma unroll
    for (int i = 1; i < Config::kStages; ++i) copy_next(group, known, steps + i - 1);
    const GroupMask mask = p.mask_of(group);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].begin();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row_of_thread(m) + 8 * r;
        s.visible[row] = visible_of(p, group, mask, tile.rows, row);
      }
#pragma unroll
      for (int i = 0; i < kOutColumns / 2; ++i) out[m][i] = 0.f;
    }

#pragma unroll 1
    for (int block = tile.begin_block; block < tile.end_block; ++block) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) scores[m][i] = 0.f;
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) multiply_keys(begin_step(group, known).k, step);

      uint32_t probs[kKeys / kStepColumns][kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        softmax[m].template to_probabilities<kKeys>(
            p.scores[tile.scores].map, tile.keys_of_all, block,
            [&](int r) { return s.visible[first_row_of_thread(m) + 8 * r]; }, scores[m]);
        // An unchanged maximum has the factor 1, which changes nothing.
        if (gpu::any_lane(softmax[m].rescale[0] != 1.f || softmax[m].rescale[1] != 1.f)) {
#pragma unroll
          for (int i = 0; i < kOutColumns / 2; ++i) out[m][i] = gpu::product(out[m][i], softmax[m].rescale[i / 2 % 2]);
        }
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 2)
          probs[i / 8][m][i % 8 / 2] = gpu::pack<Element>(scores[m][i], scores[m][i + 1]);
      }
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step) {
        const ampere::Place values =
            matrices_at<Matrices::kRowsFirst>(begin_step(group, known).v[first_column() / kChunkColumns], 0);
#pragma unroll
        for (int k = 0; k < kKeysOfStep / kStepColumns; ++k)
          multiply_step<Element, kKeysOfStep, kOutColumns>(out, probs[step * kKeysOfStep / kStepColumns + k],
                                                           values + k * kStepColumns * kChunkRowBytes);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      softmax[m].template store<Element, kOutColumns>(
          p, item, tile.scores, tile.rows, out[m], [m] { return first_row_of_thread(m); },
          [] { return first_column(); });
  }

  static DISTCA_DEVICE int first_row_of_thread(int m) { return first_row() + 16 * m + lane_of_warp() / 4; }

  /// Waits for the bytes of the next step and for all threads to be done with the last one. Returns its stage.
  DISTCA_DEVICE auto& begin_step(const GroupEntry& group, const ForwardItem& known) {
    ampere::wait_copies<Config::kStages - 2>();
    gpu::sync_cta();
    copy_next(group, known, steps + Config::kStages - 1);
    return s.stages[steps++ % Config::kStages];
  }

  /// Starts copying what comes next, if the item has more, and makes it a group.
  DISTCA_DEVICE void copy_next(const GroupEntry& group, const ForwardItem& known, int step) {
    const ForwardTile& tile = known.tile;
    constexpr int kStepsOfBlock = kKeySteps + kValueSteps;
    const int block = tile.begin_block + (step - steps_before) / kStepsOfBlock;
    const int of_block = (step - steps_before) % kStepsOfBlock;
    if (block < tile.end_block) {
      auto& stage = s.stages[step % Config::kStages];
      if (of_block < kKeySteps) {
        constexpr int kChunks = Config::kDim / kKeySteps / kChunkColumns;
        const int row = block * kKeys;
        const BlockPlace place = place_of_keys(entry, row);
        copy_keys<kChunks, kKeys, Config::kThreads>(known.k[place.source], place.row,
                                                    {tile.keys.begin - row, tile.keys.end - row}, of_block * kChunks,
                                                    p.dim, stage.k);
      } else {
        const int row = block * kKeys + (of_block - kKeySteps) * kKeysOfStep;
        const BlockPlace place = place_of_keys(entry, row);
        copy_keys<Config::kValueDim / kChunkColumns, kKeysOfStep, Config::kThreads>(
            known.v[place.source], place.row, {tile.keys.begin - row, tile.keys.end - row}, 0, p.v_dim, stage.v);
      }
      // The next entry comes while a step is computed.
      if (of_block + 1 == kStepsOfBlock && block + 1 < tile.end_block)
        entry = entry_of_keys(p, group, (block + 1) * kKeys);
    }
    ampere::end_copies();
  }

  DISTCA_DEVICE void multiply_keys(typename Config::KeyTile& keys, int step) {
    constexpr int kColumns = Config::kDim / kKeySteps;
    multiply_transposed<Element, kColumns, Config::kRows, kKeys, kKeys>(
        scores, matrices_at<Matrices::kRowsFirst>(s.q[step * (kColumns / kChunkColumns)], first_row()),
        matrices_at<Matrices::kColumnsFirst>(keys, 0));
  }
};

/// The work of one CTA of Config::kThreads threads. Shared memory is uninitialised.
template <class Config>
DISTCA_DEVICE void ampere_forward_cta(const KernelParams& p, typename Config::Shared& s) {
  AmpereForward<Config>(p, s).run();
}

}  // namespace distca::attention::cuda
