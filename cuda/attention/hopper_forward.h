// Forward of core attention over a work list. A CTA computes out and the log-sum-exp of one tile of a task after
// another.
//
// A CTA has a producer warp and two consumer warpgroups. Each consumer has 64 of a tile's 128 rows. Beyond 256 columns
// of values, where the sums of 64 rows are too many registers, both have the same 64 rows, and each has half of the
// columns. Both go over the same blocks of keys, in ascending order from the start of the document. While one
// multiplies, the other does its softmax. Within a warpgroup the scores of block j + 1 are multiplied together with the
// values of block j.
//
// Everything that is done for a row depends on that row and on the keys of the blocks that it sees. A block of which it
// sees nothing leaves its maximum, its sum and its output as they are, to the bit (2^0 = 1, x + 0 = x). Only one
// decision is made for a whole warp or tile: whether to mask. That changes nothing for a row that sees everything.
//
// What each barrier protects
//   items.full/empty   index[stage]: written by the producer's lane 0, read by all 256 consumers
//   q.full/empty       the tile of queries: bytes of the copy engine; 8 consumer warps after their last scores
//   k.full/empty       a block of keys: bytes; 8 warps, each after wait_groups has covered its reading products
//   v.full/empty       a block of values: bytes, or lane 0 after all lanes have cleared rows and fenced; 8 warps
//   loaded             bytes of a block of values that is cleared before v.full
//   named 0, 1         whose turn it is to start products. A warpgroup waits on its own barrier and arrives on the
//                      other's. Both take the same number of turns: warpgroup 1 gives the first, warpgroup 0 takes the
//                      last one back
// The phase of a ring is (uses / stages) % 2, which each side counts for itself. A producer waits on parity ^ 1, which
// an unused barrier passes. Each side makes the same moves on every ring: one for each item, or one for each block of
// an item.
#pragma once

#include "attention/hopper_parts.h"

namespace distca::attention::cuda {

template <class Element_, int kDim_, int kValueDim_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // like kValueDim rounded up to whole chunks; columns beyond the head are zero
  static constexpr int kValueDim = kValueDim_;
  /// Whether both warpgroups have the same rows, and each has half of the columns of out.
  static constexpr bool kSameRows = kValueDim > 256;
  static constexpr int kOutColumns = kSameRows ? kValueDim / 2 : kValueDim;
  static constexpr int kRows = kSameRows ? 64 : 128;
  /// This is part of the numerics: blocks start at multiples of it.
  static constexpr int kKeys = kDim > 192 ? 64 : 128;
  /// Stages of keys and of values: up to four of each, as many as there is room for.
  static constexpr int kKeyBytes = kKeys * kDim * 2, kValueBytes = kKeys * kValueDim * 2;
  static constexpr int kRoom = 224 * 1024 - kRows * kDim * 2;
  static constexpr int kKeyStages = minimum(kRoom / (kKeyBytes + kValueBytes), 4);
  static constexpr int kValueStages = minimum((kRoom - kKeyStages * kKeyBytes) / kValueBytes, 4);
  static_assert(kKeyStages >= 1 && kValueStages >= 1);

  struct alignas(1024) Shared {
    SharedTile<kDim / kBoxColumns, kRows> q;
    SharedTile<kDim / kBoxColumns, kKeys> k[kKeyStages];
    SharedTile<kValueDim / kBoxColumns, kKeys> v[kValueStages];
    Stages<1> q_stages;
    Stages<kKeyStages> k_stages;
    Stages<kValueStages> v_stages;
    hopper::Barrier loaded;
    ItemRing items;
  };
};

template <class Config>
struct ForwardProducer {
  static constexpr int kKeys = Config::kKeys;
  static constexpr int kChunks = Config::kDim / kBoxColumns, kValueChunks = Config::kValueDim / kBoxColumns;

  const KernelParams& p;
  typename Config::Shared& s;
  Ring<2> items{};
  Ring<1> q{};
  AnyRing<Config::kKeyStages> k{};
  AnyRing<Config::kValueStages> v{};
  int loaded_parity = 0;
  // Whose maps this CTA has acquired last.
  int last_task = -1;
  int last_group = -1;
  // What is known of the item. It is read once.
  BlockTable key_table{}, value_table{};
  const TensorMap* maps = nullptr;  // of keys, then of values
  int kv_head = 0;
  RowRange keys{};

  DISTCA_DEVICE void run() {
    for (int index; (index = take_item(p, s.items, items)) < p.num_items();) {
      const WorkItem item = p.items[index];
      const ForwardTile tile = forward_tile(p, item, Config::kKeys);
      begin_item(item, tile);
      // As the consumers use them: the values of a block come after the keys of the next one. The first keys come while
      // they still use the tile of queries before.
      load_keys(tile.begin_block);
      load_tile(item);
#pragma unroll 1
      for (int block = tile.begin_block + 1; block < tile.end_block; ++block) {
        load_keys(block);
        load_values(block - 1);
      }
      load_values(tile.end_block - 1);
    }
  }

  DISTCA_DEVICE void begin_item(const WorkItem& item, const ForwardTile& tile) {
    const GroupEntry& group = p.groups[item.group];
    maps = p.maps + group.k_maps;
    kv_head = item.kv_head;
    keys = tile.keys;
    key_table.set(p, group);
    value_table = key_table;
    if (lane_of_warp() == 0) {
      if (item.task != last_task) hopper::acquire_map(p.maps + p.tasks[item.task].q_map);
      if (item.group != last_group)
        for (int i = 0; i < kMapsOfGroup; ++i) hopper::acquire_map(maps + i);
    }
    last_task = item.task;
    last_group = item.group;
  }

  DISTCA_DEVICE void load_tile(const WorkItem& item) {
    await_empty(s.q_stages.empty[0], q.parity());
    if (lane_of_warp() == 0) {
      hopper::Barrier& full = s.q_stages.full[0];
      full.expect_bytes(query_bytes<kChunks>(p));
      load_queries<kChunks, Config::kRows>(p, p.maps + p.tasks[item.task].q_map, kv_head, item.index, full, s.q);
      full.arrive();
    }
    hopper::sync_warp();
    q.advance();
  }

  DISTCA_DEVICE void load_keys(int block) {
    const int stage = k.stage();
    await_empty(s.k_stages.empty[stage], k.parity());
    KeyBlock<kChunks, kKeys>{s.k[stage], s.k_stages.full[stage], s.loaded}.load(maps, key_table, kv_head, block * kKeys,
                                                                                keys, false, loaded_parity);
    k.advance();
  }

  DISTCA_DEVICE void load_values(int block) {
    const int stage = v.stage();
    await_empty(s.v_stages.empty[stage], v.parity());
    KeyBlock<kValueChunks, kKeys>{s.v[stage], s.v_stages.full[stage], s.loaded}.load(
        maps + kMapsOfKeys, value_table, kv_head, block * kKeys, keys, true, loaded_parity);
    v.advance();
  }
};

/// One consumer warpgroup. It computes 64 rows of one tile after another. A thread has two rows, eight apart.
template <class Config>
struct ForwardConsumer {
  using Element = typename Config::Element;
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys, kOutColumns = Config::kOutColumns;

  const KernelParams& p;
  typename Config::Shared& s;
  Ring<2> items;
  Ring<1> q;
  AnyRing<Config::kKeyStages> k;
  AnyRing<Config::kValueStages> v;

  float scores[kKeys / 2];
  float out[kOutColumns / 2];
  uint32_t probs[kKeys / 16][4];
  SoftmaxRows softmax;
  RowRange visible[2];  // keys that each of the thread's rows sees

  DISTCA_DEVICE ForwardConsumer(const KernelParams& params, typename Config::Shared& shared) : p(params), s(shared) {}

  // Registers are scarce. What follows from the thread's number is therefore computed when it is needed.
  static DISTCA_DEVICE int warpgroup() { return hopper::thread_of_cta() / kWarpgroup - 1; }
  /// The first row of the warpgroup, in the tile, and the first of its columns of out.
  static DISTCA_DEVICE int first_row() { return Config::kSameRows ? 0 : 64 * warpgroup(); }
  static DISTCA_DEVICE int first_column() { return Config::kSameRows ? kOutColumns * warpgroup() : 0; }
  /// The first of this thread's two rows, in the tile.
  static DISTCA_DEVICE int first_row_of_thread() {
    const int number = hopper::thread_of_cta();
    const int thread = Config::kSameRows ? number % kWarpgroup : number - kWarpgroup;
    return thread / kWarp * 16 + thread % kWarp / 4;
  }

  DISTCA_DEVICE void await_turn() { hopper::sync_named(kFirstTurn + warpgroup(), kConsumers); }
  DISTCA_DEVICE void pass_turn() { hopper::arrive_named(kFirstTurn + 1 - warpgroup(), kConsumers); }

  DISTCA_DEVICE void run() {
    if (warpgroup() == 1) pass_turn();
    for (int index; (index = begin_item(s.items, items)) < p.num_items(); end_item(s.items, items))
      work(p.items[index]);
    if (warpgroup() == 0) await_turn();
  }

  DISTCA_DEVICE void work(const WorkItem& item) {
    const ForwardTile tile = forward_tile(p, item, Config::kKeys);
    begin_rows(item, tile);
    s.q_stages.full[0].wait(q.parity());

    s.k_stages.full[k.stage()].wait(k.parity());
    await_turn();
    multiply_scores();
    pass_turn();
    hopper::wait_groups<0>();
    hopper::pin(scores);
    release(s.k_stages.empty[k.stage()]);
    k.advance();
    to_probabilities(tile, tile.begin_block);
    pack_probs();

    for (int block = tile.begin_block + 1; block < tile.end_block; ++block) {
      s.k_stages.full[k.stage()].wait(k.parity());
      s.v_stages.full[v.stage()].wait(v.parity());
      await_turn();
      multiply_scores();
      multiply_values();
      pass_turn();
      hopper::wait_groups<1>();
      hopper::pin(scores);
      release(s.k_stages.empty[k.stage()]);
      k.advance();
      to_probabilities(tile, block);
      hopper::wait_groups<0>();
      hopper::pin(out);
      hopper::pin(probs);
      release(s.v_stages.empty[v.stage()]);
      v.advance();
      rescale_out();
      pack_probs();
    }
    release(s.q_stages.empty[0]);
    q.advance();

    s.v_stages.full[v.stage()].wait(v.parity());
    await_turn();
    multiply_values();
    pass_turn();
    hopper::wait_groups<0>();
    hopper::pin(out);
    release(s.v_stages.empty[v.stage()]);
    v.advance();
    softmax.template store<Element, kOutColumns>(
        p, item, tile.scores, tile.rows, out, [] { return first_row_of_thread(); }, [] { return first_column(); });
  }

  DISTCA_DEVICE void begin_rows(const WorkItem& item, const ForwardTile& tile) {
    softmax.begin();
    const GroupEntry& group = p.groups[item.group];
    const GroupMask mask = p.mask_of(group);
    const int row = first_row_of_thread();
#pragma unroll
    for (int i = 0; i < 2; ++i) visible[i] = visible_of(p, group, mask, tile.rows, row + 8 * i);
#pragma unroll
    for (int i = 0; i < kOutColumns / 2; ++i) out[i] = 0.f;
  }

  DISTCA_DEVICE void multiply_scores() {
    const hopper::Operand queries = hopper::make_operand(&s.q[0][first_row()][0], kNoChunk);
    const hopper::Operand keys = hopper::make_operand(&s.k[k.stage()][0][0][0], kNoChunk);
    hopper::pin(scores);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kDim / kInnerStep; ++i) {
      const int chunk = i / 4, inner = i % 4 * kInnerStep * 2;
      hopper::multiply<Element, kKeys, hopper::Columns::kInner, hopper::Columns::kInner>(
          scores, hopper::advance(queries, chunk * Config::kRows * kRowBytes + inner),
          hopper::advance(keys, chunk * kKeys * kRowBytes + inner), i > 0);
    }
    hopper::end_group();
  }

  DISTCA_DEVICE void multiply_values() {
    const hopper::Operand values =
        hopper::make_operand(&s.v[v.stage()][first_column() / kBoxColumns][0][0], kKeys * kRowBytes);
    hopper::pin(out);
    hopper::pin(probs);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kKeys / kInnerStep; ++i)
      hopper::multiply<Element, kOutColumns, hopper::Columns::kOuter>(
          out, probs[i], hopper::advance(values, i * kInnerStep * kRowBytes), true);
    hopper::end_group();
  }

  DISTCA_DEVICE void to_probabilities(const ForwardTile& tile, int block) {
    softmax.template to_probabilities<kKeys>(
        p.scores[tile.scores].map, tile.keys_of_all, block, [&](int r) -> const RowRange& { return visible[r]; },
        scores);
  }

  DISTCA_DEVICE void pack_probs() {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) probs[i][j] = hopper::pack<Element>(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
  }

  DISTCA_DEVICE void rescale_out() {
#pragma unroll
    for (int i = 0; i < kOutColumns / 2; ++i) out[i] = hopper::product(out[i], softmax.rescale[i / 2 % 2]);
  }
};

/// The work of one CTA of kThreads threads. Shared memory is uninitialised.
template <class Config>
DISTCA_DEVICE void forward_cta(const KernelParams& p, typename Config::Shared& s) {
  const int thread = hopper::thread_of_cta();
  if (thread == 0) {
    s.q_stages.init(1, kConsumerWarps);
    s.k_stages.init(1, kConsumerWarps);
    s.v_stages.init(1, kConsumerWarps);
    s.loaded.init(1);
    s.items.stages.init(1, kConsumers);
    hopper::fence_barrier_init();
  }
  // Rows of the tile of queries that no box reaches stay zero.
  for (int i = thread; i < static_cast<int>(sizeof(s.q) / 16); i += kThreads)
    hopper::store_shared(&s.q[0][0][0] + i * 8, hopper::Words4{});
  hopper::fence_shared();
  hopper::sync_cta();
  if (thread < kWarpgroup) {
    hopper::lower_registers<kProducerRegisters>();
    if (thread < kWarp) ForwardProducer<Config>{.p = p, .s = s}.run();
  } else {
    hopper::raise_registers<kConsumerRegisters>();
    ForwardConsumer<Config>(p, s).run();
  }
}

}  // namespace distca::attention::cuda
