// Backward of core attention over a work list. An item is a block of keys of one key/value head. It goes over all tiles
// of all tasks that see it, keeps dk and dv in registers until the end, and adds to dq in memory:
//
//   P^T = exp2(scores(K Q^T) - lse)     dV += P^T dout      dP^T = V dout^T
//   dS^T = P^T * (dP^T - delta)         dK += dS^T Q        dQ  += dS K
//
// Everything is transposed: keys are the rows. P^T is therefore in the registers that the product for dV wants. dS^T
// goes through shared memory, for dK and, read the other way, for dQ. Sums of dq are fp32, in parts of a tile's rows by
// 64 columns, in the order of the accumulators' registers: no thread needs an exchange. Parts go through shared memory
// to two warps beside the producer, for which the copy engine adds them. Where shared memory has no room for that, the
// consumers add 16 bytes at a time.
//
// Up to 128 columns, each warpgroup has 64 of 128 keys, and one of two parts of dq. If dq has one part, it is a
// warpgroup's every other time. Beyond 128 columns, both compute P of the same 64 keys. Then one goes on with dP, dS
// and dk, the other with dv and dq. Beyond 256 columns, the kernel runs twice, each time for half of the columns of dq,
// dk and dv. A tile has 32 rows there; the product for dq, which wants 64, computes 32 more that nobody takes.
//
// While a warpgroup computes exponentials, its products for dP run, and while it hands over a part of dq, the next
// product.
//
// Where documents share keys, items of several groups add to the same dk and dv, one after another in the order of
// their groups: before[], stored[]. A row of keys may be in other blocks of other documents; therefore an item may wait
// for several, and for both of their warpgroups. They were taken earlier.
//
// Deterministic mode: items add to each part of a tile in ascending order of their blocks, and turns[] counts those
// that have. An item whose turn it is not yet waits for one that was taken earlier (work_list.h), which itself waits
// only for earlier ones.
//
// What each barrier protects
//   items.full/empty      as in forward, and also read by the warps that add dq; an item's uses are also those of
//                         key_stages
//   key_stages            k and v of an item: two arrivals (bytes, or cleared rows) / 8 consumer warps
//   tile_stages           q, dout, lse, delta, visible of a tile: 32 lanes and bytes / 8 warps after wait_groups<0>
//   loaded                bytes of a block that is cleared before it is full
//   named kScoresWritten  dscores[stage] of step i is written (after fence_shared), and both warpgroups may read it.
//                         When both pass it at step i + 1, both have read that of step i, because wait_groups<0> of
//                         step i comes before. Therefore it may be written at step i + 2. With one stage of tiles
//                         there is one dscores: it is written at step i + 1, whose tile comes after all have released
//                         that of step i
//   dq.stages[i]          every other part of dq: 4 consumer warps, each after fence_shared / the lane that adds it,
//                         once the copy engine has read it
//   named kQueryTurn      within the warpgroup that adds dq itself: its turn has come; all its adds are done
//   named kFirst/SecondStore  within a warpgroup: its turn to store dk or dv has come; it has stored them
#pragma once

#include "attention/backward_parts.h"

namespace distca::attention::cuda {

template <int kRegisters>
DISTCA_DEVICE void clear(float (&sums)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) sums[i] = 0.f;
}

/// The common part of the consumers: their work on a tile of queries and 64 keys. A thread has two keys, eight apart.
template <class Config>
struct BackwardConsumer {
  using Element = typename Config::Element;
  using Columns_ = hopper::Columns;
  static constexpr int kDim = Config::kDim, kValueDim = Config::kValueDim;
  static constexpr int kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kColumns = Config::kColumns, kValueColumns = Config::kValueColumns;
  static constexpr int kScores = kRows / 2;  // registers of a product of 64 keys and all rows

  const KernelParams& p;
  typename Config::Shared& s;
  Ring<2> items;
  Ring<Config::kStages> tiles;

  float scores[kScores];
  float dprobs[kScores];
  uint32_t probs[kRows / 16][4];  // P^T

  DISTCA_DEVICE BackwardConsumer(const KernelParams& params, typename Config::Shared& shared) : p(params), s(shared) {}

  // Registers are scarce. What follows from the thread's number is therefore computed when it is needed.
  static DISTCA_DEVICE int warpgroup() { return hopper::thread_of_cta() / kWarpgroup - 1; }
  static DISTCA_DEVICE int thread() { return hopper::thread_of_cta() % kWarpgroup; }
  DISTCA_DEVICE int pass() const { return Config::kPasses == 1 ? 0 : p.pass; }
  /// The first key of the warpgroup, in the block.
  static DISTCA_DEVICE int first_key() { return Config::kWide ? 0 : 64 * warpgroup(); }
  /// The first of this thread's two keys.
  static DISTCA_DEVICE int first_key_of_thread() {
    const int t = thread();
    return first_key() + t / kWarp * 16 + t % kWarp / 4;
  }
  /// The first column of this thread's pairs: they are query rows 8 j + this and the next one.
  static DISTCA_DEVICE int first_row_of_thread() { return lane_of_warp() % 4 * 2; }

  /// Calls step(facts) for each tile that sees the item's keys and releases it, and the keys at the end.
  template <class Step>
  DISTCA_DEVICE void for_each_tile(int num_tiles, const Step& step) {
    s.key_stages.full[0].wait(items.uses % 2);
#pragma unroll 1
    for (const int end = tiles.uses + num_tiles; tiles.uses < end;) {
      s.tile_stages.full[tiles.stage()].wait(tiles.parity());
      step(s.facts[tiles.stage()]);
      release(s.tile_stages.empty[tiles.stage()]);
      tiles.advance();
    }
    release(s.key_stages.empty[0]);
  }

  /// Sets products = 64 rows of `left` (keys or values) times the transpose of `right` (q or dout).
  template <int kChunks>
  DISTCA_DEVICE void multiply_rows(SharedTile<kChunks, kKeys>& left, SharedTile<kChunks, kRows>& right,
                                   float (&products)[kScores]) {
    const hopper::Operand a = hopper::make_operand(&left[0][first_key()][0], kNoChunk);
    const hopper::Operand b = hopper::make_operand(&right[0][0][0], kNoChunk);
    hopper::pin(products);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) {
      const int chunk = i / 4, inner = i % 4 * kInnerStep * 2;
      hopper::multiply<Element, kRows, Columns_::kInner, Columns_::kInner>(
          products, hopper::advance(a, chunk * kKeys * kRowBytes + inner),
          hopper::advance(b, chunk * kRows * kRowBytes + inner), i > 0);
    }
    hopper::end_group();
  }

  /// dV += P^T dout.
  DISTCA_DEVICE void multiply_probabilities(float (&sums)[kValueColumns / 2]) {
    const hopper::Operand b =
        hopper::make_operand(&s.dout[tiles.stage()][pass() * (kValueColumns / kBoxColumns)][0][0], kRows * kRowBytes);
    hopper::pin(sums);
    hopper::pin(probs);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kRows / kInnerStep; ++i)
      hopper::multiply<Element, kValueColumns, Columns_::kOuter>(sums, probs[i],
                                                                 hopper::advance(b, i * kInnerStep * kRowBytes), true);
    hopper::end_group();
  }

  /// Turns products of keys and queries into probabilities. With kGradients, products of values and gradients of out,
  /// which may still be under way, become dS, in shared memory.
  template <bool kGradients>
  DISTCA_DEVICE void probabilities(const TileFacts<kRows>& facts) {
    const auto kind = facts.kind;
    if (kind == facts.kMapped)
      probabilities_of<kGradients, true, true>(facts);
    else if (kind == facts.kMasked)
      probabilities_of<kGradients, false, true>(facts);
    else
      probabilities_of<kGradients, false, false>(facts);
  }

  template <bool kGradients, bool kMapped, bool kMasked>
  DISTCA_DEVICE void probabilities_of(const TileFacts<kRows>& facts) {
    if constexpr (kMapped) map_products(facts);
    if constexpr (!kMapped || !kGradients) exponentials<kMasked>(facts);
    if constexpr (kGradients) {
      hopper::stay_behind(scores, &s.nowhere);
      hopper::wait_groups<0>();
      hopper::pin(dprobs);
      subtract_delta(facts);
      if constexpr (kMapped) {
        scale_by_slope(facts);
        exponentials<kMasked>(facts);
      }
      store_gradients();
    }
  }

  DISTCA_DEVICE void map_products(const TileFacts<kRows>& facts) {
    const ScoreMap& map = p.scores[facts.scores].map;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = mapped_score(map, scores[i]);
  }

  template <bool kMasked>
  DISTCA_DEVICE void exponentials(const TileFacts<kRows>& facts) {
    const int first_row = first_row_of_thread(), first_key = first_key_of_thread();
    const float exponent_scale = facts.exponent_scale;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const int row = first_row + i * 2;
      const FloatPair lse = pair_of(facts.lse, row);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first_key + j / 2 * 8;
        float& x = scores[i + j];
        x = hopper::exp2_fast(hopper::fused(x, exponent_scale, j % 2 == 0 ? -lse.x : -lse.y));
        if (kMasked && (key < facts.visible[row + j % 2].begin || key >= facts.visible[row + j % 2].end)) x = 0.f;
      }
    }
  }

  DISTCA_DEVICE void subtract_delta(const TileFacts<kRows>& facts) {
    const int first_row = first_row_of_thread();
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const FloatPair delta = pair_of(facts.delta, first_row + i * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) dprobs[i + j] -= j % 2 == 0 ? delta.x : delta.y;
    }
  }
  /// What two neighbouring rows have; the first is even.
  static DISTCA_DEVICE FloatPair pair_of(const float (&of_rows)[kRows], int row) {
    return *reinterpret_cast<const FloatPair*>(&of_rows[row]);
  }
  DISTCA_DEVICE void scale_by_slope(const TileFacts<kRows>& facts) {
    const ScoreMap& map = p.scores[facts.scores].map;
    const float inverse = map.cap != 0.f ? 1.f / map.cap : 0.f;  // without a cap the slope is 1
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float t = hopper::product(scores[i], inverse);
      dprobs[i] = hopper::product(dprobs[i], hopper::fused(-t, t, 1.f));
    }
  }
  DISTCA_DEVICE void store_gradients() {
    const int first_row = first_row_of_thread(), first_key = first_key_of_thread();
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int key = first_key + i / 2 % 2 * 8, piece = i / 4;
      hopper::store_shared(
          &s.dscores[tiles.stage()][0][key][(piece ^ (key % 8)) * 8 + first_row],
          hopper::pack<Element>(hopper::product(scores[i], dprobs[i]), hopper::product(scores[i + 1], dprobs[i + 1])));
    }
    hopper::fence_shared();
  }

  DISTCA_DEVICE void pack_probabilities() {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) probs[i / 8][i % 8 / 2] = hopper::pack<Element>(scores[i], scores[i + 1]);
  }

  /// dK += dS^T Q, for the warpgroup's keys.
  DISTCA_DEVICE void multiply_gradients(float (&sums)[kColumns / 2]) {
    const hopper::Operand a = hopper::make_operand(&s.dscores[tiles.stage()][0][first_key()][0], kNoChunk);
    const hopper::Operand b =
        hopper::make_operand(&s.q[tiles.stage()][pass() * (kColumns / kBoxColumns)][0][0], kRows * kRowBytes);
    hopper::pin(sums);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kRows / kInnerStep; ++i)
      hopper::multiply<Element, kColumns, Columns_::kInner, Columns_::kOuter>(
          sums, hopper::advance(a, i * kInnerStep * 2), hopper::advance(b, i * kInnerStep * kRowBytes), true);
    hopper::end_group();
  }

  /// Multiplies one part of the tile's dq. Parts are numbered in the pass.
  DISTCA_DEVICE void multiply_queries(int part, float (&dq)[32]) {
    const hopper::Operand a = hopper::make_operand(&s.dscores[tiles.stage()][0][0][0], kKeys * kRowBytes);
    const hopper::Operand b = hopper::make_operand(&s.k[part_of_tile(part)][0][0], kKeys * kRowBytes);
    hopper::pin(dq);
    hopper::begin_products();
#pragma unroll
    for (int i = 0; i < kKeys / kInnerStep; ++i)
      hopper::multiply<Element, 64, Columns_::kOuter, Columns_::kOuter>(
          dq, hopper::advance(a, i * kInnerStep * kRowBytes), hopper::advance(b, i * kInnerStep * kRowBytes), i > 0);
    hopper::end_group();
  }

  DISTCA_DEVICE int part_of_tile(int part) const { return pass() * Config::kPartsOfPass + part; }

  /// Hands a part of the tile's dq to the warp that adds it.
  DISTCA_DEVICE void hand_over_queries(const TileFacts<kRows>& facts, int part, const float (&dq)[32]) {
    const uint32_t number = static_cast<uint32_t>(tiles.uses) * Config::kPartsOfPass + static_cast<uint32_t>(part);
    const uint32_t buffer = number % 2;
    auto& handed = s.dq.parts[buffer];
    s.dq.stages.empty[buffer].wait(static_cast<int>(number / 2 % 2 ^ 1));
    if (thread() < Config::kPartThreads) {
      float* elements = handed.elements + thread() * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        hopper::store_shared(elements + i * Config::kPartThreads * 4, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                             dq[4 * i + 3]);
    }
    if (thread() == 0) {
      handed.sums = facts.dq_sums + part_of_tile(part) * Config::kPartElements;
      handed.turn = facts.turns == nullptr ? nullptr : facts.turns + part_of_tile(part);
      handed.blocks_before = facts.blocks_before;
    }
    hopper::fence_shared();
    release(s.dq.stages.full[buffer]);
  }

  DISTCA_DEVICE void add_queries(const TileFacts<kRows>& facts, int part, const float (&dq)[32]) {
    float* sums = facts.dq_sums + part * Config::kPartElements + thread() * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      hopper::add_global(sums + i * Config::kPartThreads * 4, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  DISTCA_DEVICE void await_turn(const TileFacts<kRows>& facts) {
    if (facts.turns == nullptr) return;
    if (thread() == 0)
      while (hopper::load_acquire(facts.turns) != facts.blocks_before) hopper::pause();
    hopper::sync_named(kQueryTurn, kWarpgroup);
  }
  DISTCA_DEVICE void pass_turn(const TileFacts<kRows>& facts) {
    if (facts.turns == nullptr) return;
    hopper::fence_gpu();
    hopper::sync_named(kQueryTurn, kWarpgroup);
    if (thread() == 0) hopper::store_release(facts.turns, facts.blocks_before + 1);
  }

  /// The words that say whether the two warpgroups have stored the key gradients of an item.
  DISTCA_DEVICE int* stored(int index) const { return p.stored + 2 * index; }
  DISTCA_DEVICE void await_store(const WorkItem& item) {
    if (item.before_begin == item.before_end) return;
    if (thread() == 0)
      for (int i = 2 * item.before_begin; i < 2 * item.before_end; ++i)
        while (hopper::load_acquire(stored(p.before[i / 2]) + i % 2) == 0) hopper::pause();
    hopper::sync_named(kFirstStore + warpgroup(), kWarpgroup);
  }
  DISTCA_DEVICE void pass_store(int index, const WorkItem& item) {
    if (item.is_awaited == 0) return;
    hopper::fence_gpu();
    hopper::sync_named(kFirstStore + warpgroup(), kWarpgroup);
    if (thread() == 0) hopper::store_release(stored(index) + warpgroup(), 1);
  }

  /// Writes the pass's columns of dk or dv, of which there are `columns` in all, times `factor`, to where the group's
  /// gradients go, or adds them there.
  template <int kSums>
  DISTCA_DEVICE void store_keys(const WorkItem& item, const float (&sums)[kSums], float factor, int columns,
                                RowView RunEntry::* view) {
    store_key<kSums, 0>(item, sums, factor, columns, view);
    store_key<kSums, 1>(item, sums, factor, columns, view);
  }

  template <int kSums, int kRow>
  DISTCA_DEVICE void store_key(const WorkItem& item, const float (&sums)[kSums], float factor, int columns,
                               RowView RunEntry::* view) {
    const GroupEntry& group = p.groups[item.group];
    const int row = item.index * kKeys + first_key_of_thread() + 8 * kRow;
    if (row < group.kv_begin || row >= group.kv_end) return;
    int first = group.run_begin, last = group.run_end - 1;
    while (first < last) {  // finds the first run that ends after the row
      const int middle = (first + last) / 2;
      if (p.runs[middle].end > row)
        last = middle;
      else
        first = middle + 1;
    }
    const RunEntry& run = p.runs[first];
    const bool floats = run.dtype == DType::kFloat32;
    const int begin = pass() * 2 * kSums, first_column = begin + first_row_of_thread();
    std::byte* dst = address(run.*view, row - run.begin, item.kv_head) + first_column * (floats ? 4 : 2);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      if (begin + 8 * j >= columns) break;
      const float x = hopper::product(sums[4 * j + 2 * kRow], factor);
      const float y = hopper::product(sums[4 * j + 2 * kRow + 1], factor);
      if (run.is_added != 0)
        hopper::add_global(reinterpret_cast<float*>(dst + j * 32), x, y);
      else if (floats)
        *reinterpret_cast<FloatPair*>(dst + j * 32) = {x, y};
      else
        *reinterpret_cast<uint32_t*>(dst + j * 16) = hopper::pack<Element>(x, y);
    }
  }
};

/// The consumer up to 128 columns: it computes everything about 64 of the item's keys.
template <class Config>
struct NarrowConsumer : BackwardConsumer<Config> {
  using Base = BackwardConsumer<Config>;
  using Base::Base;
  using Base::p, Base::s, Base::tiles, Base::scores, Base::dprobs, Base::probs;
  static constexpr int kDim = Config::kDim, kValueDim = Config::kValueDim, kRows = Config::kRows;

  float dk[kDim / 2];
  float dv[kValueDim / 2];

  DISTCA_DEVICE void run() {
    for (int index; (index = begin_item(s.items, this->items)) < p.num_items(); end_item(s.items, this->items)) {
      clear(dk);
      clear(dv);
      this->for_each_tile(p.items[index].num_tiles, [&](const TileFacts<Config::kRows>& facts) { step(facts); });
      index = this_item(s.items, this->items);
      const WorkItem& item = p.items[index];
      this->await_store(item);
      this->store_keys(item, dk, p.scores_of(p.groups[item.group]).scale, p.dim, &RunEntry::dk);
      this->store_keys(item, dv, 1.f, p.v_dim, &RunEntry::dv);
      this->pass_store(index, item);
    }
  }

  DISTCA_DEVICE void step(const TileFacts<Config::kRows>& facts) {
    const int stage = tiles.stage();
    this->multiply_rows(s.k, s.q[stage], scores);
    this->multiply_rows(s.v, s.dout[stage], dprobs);
    hopper::wait_groups<1>();
    hopper::pin(scores);
    this->template probabilities<true>(facts);
    this->pack_probabilities();
    this->multiply_probabilities(dv);
    hopper::sync_named(kScoresWritten, kConsumers);
    if (Config::kParts == 2 || stage == this->warpgroup()) {
      const int part = Config::kParts == 2 ? this->warpgroup() : 0;
      float dq[32];
      this->multiply_queries(part, dq);
      this->multiply_gradients(dk);
      hopper::wait_groups<1>();
      hopper::pin(dq);
      this->hand_over_queries(facts, part, dq);
    } else {
      this->multiply_gradients(dk);
    }
    hopper::wait_groups<0>();
    hopper::pin(dk);
    hopper::pin(dv);
    hopper::pin(probs);
  }
};

/// The first warpgroup beyond 128 columns: it computes dS and dk.
template <class Config>
struct WideKeyConsumer : BackwardConsumer<Config> {
  using Base = BackwardConsumer<Config>;
  using Base::Base;
  using Base::p, Base::s, Base::tiles, Base::scores, Base::dprobs;

  float dk[Config::kColumns / 2];

  DISTCA_DEVICE void run() {
    for (int index; (index = begin_item(s.items, this->items)) < p.num_items(); end_item(s.items, this->items)) {
      clear(dk);
      this->for_each_tile(p.items[index].num_tiles, [&](const TileFacts<Config::kRows>& facts) { step(facts); });
      index = this_item(s.items, this->items);
      const WorkItem& item = p.items[index];
      this->await_store(item);
      this->store_keys(item, dk, p.scores_of(p.groups[item.group]).scale, p.dim, &RunEntry::dk);
      this->pass_store(index, item);
    }
  }

  DISTCA_DEVICE void step(const TileFacts<Config::kRows>& facts) {
    const int stage = tiles.stage();
    this->multiply_rows(s.k, s.q[stage], scores);
    this->multiply_rows(s.v, s.dout[stage], dprobs);
    hopper::wait_groups<1>();
    hopper::pin(scores);
    this->template probabilities<true>(facts);
    hopper::sync_named(kScoresWritten, kConsumers);
    this->multiply_gradients(dk);
    hopper::wait_groups<0>();
    hopper::pin(dk);
  }
};

/// The second warpgroup beyond 128 columns: it computes dv and dq.
template <class Config>
struct WideValueConsumer : BackwardConsumer<Config> {
  using Base = BackwardConsumer<Config>;
  using Base::Base;
  using Base::p, Base::s, Base::tiles, Base::scores, Base::probs;

  float dv[Config::kValueColumns / 2];

  DISTCA_DEVICE void run() {
    for (int index; (index = begin_item(s.items, this->items)) < p.num_items(); end_item(s.items, this->items)) {
      clear(dv);
      this->for_each_tile(p.items[index].num_tiles, [&](const TileFacts<Config::kRows>& facts) { step(facts); });
      index = this_item(s.items, this->items);
      const WorkItem& item = p.items[index];
      this->await_store(item);
      this->store_keys(item, dv, 1.f, p.v_dim, &RunEntry::dv);
      this->pass_store(index, item);
    }
  }

  DISTCA_DEVICE void step(const TileFacts<Config::kRows>& facts) {
    const int stage = tiles.stage();
    this->multiply_rows(s.k, s.q[stage], scores);
    hopper::wait_groups<0>();
    hopper::pin(scores);
    this->template probabilities<false>(facts);
    this->pack_probabilities();
    this->multiply_probabilities(dv);
    hopper::sync_named(kScoresWritten, kConsumers);
    if constexpr (Config::kHandsOver)
      hand_over(facts);
    else
      add(facts);
    hopper::pin(dv);
    hopper::pin(probs);
  }

  /// While one part is handed over, the next one is multiplied, if there are registers for both.
  DISTCA_DEVICE void hand_over(const TileFacts<Config::kRows>& facts) {
    constexpr int kSets = Config::kPasses == 1 ? 2 : 1;
    float dq[kSets][32];
#pragma unroll
    for (int part = 0; part < Config::kPartsOfPass; ++part) {
      if (part == 0 || kSets == 1) this->multiply_queries(part, dq[part % kSets]);
      if (kSets == 2 && part + 1 < Config::kPartsOfPass) {
        this->multiply_queries(part + 1, dq[(part + 1) % kSets]);
        hopper::wait_groups<1>();
      } else {
        hopper::wait_groups<0>();
      }
      hopper::pin(dq[part % kSets]);
      this->hand_over_queries(facts, part, dq[part % kSets]);
    }
  }

  DISTCA_DEVICE void add(const TileFacts<Config::kRows>& facts) {
    this->await_turn(facts);
#pragma unroll 1
    for (int part = 0; part < Config::kPartsOfPass; ++part) {
      float dq[32];
      this->multiply_queries(part, dq);
      hopper::wait_groups<0>();
      hopper::pin(dq);
      this->add_queries(facts, part, dq);
    }
    this->pass_turn(facts);
  }
};

/// The work of one CTA of kThreads threads. Shared memory is uninitialised.
template <class Config>
DISTCA_DEVICE void backward_cta(const KernelParams& p, typename Config::Shared& s) {
  const int thread = hopper::thread_of_cta();
  if (thread == 0) {
    s.key_stages.init(2, kConsumerWarps);
    s.tile_stages.init(kWarp, kConsumerWarps);
    s.loaded.init(1);
    s.items.stages.init(1, kConsumers + (Config::kHandsOver ? 2 : 0));
    if constexpr (Config::kHandsOver) s.dq.stages.init(kWarpgroup / kWarp, 1);
    hopper::fence_barrier_init();
  }
  // Rows of tiles of queries that no box reaches stay zero.
  static_assert(sizeof(s.q) % 16 == 0 && sizeof(s.dout) % 16 == 0);
  for (int i = thread; i < static_cast<int>(sizeof(s.q) / 16); i += kThreads)
    hopper::store_shared(&s.q[0][0][0][0] + i * 8, hopper::Words4{});
  for (int i = thread; i < static_cast<int>(sizeof(s.dout) / 16); i += kThreads)
    hopper::store_shared(&s.dout[0][0][0][0] + i * 8, hopper::Words4{});
  hopper::fence_shared();
  hopper::sync_cta();
  if (thread < kWarpgroup) {
    hopper::lower_registers<kProducerRegisters>();
    const int warp = thread / kWarp;
    if (warp == 0) BackwardProducer<Config>{p, s, {}, {}, {}}.run();
    if constexpr (Config::kHandsOver)
      if (warp == 1 || warp == 2) DqAdder<Config>{p, s, static_cast<uint32_t>(warp - 1), {}, {}}.run();
  } else {
    hopper::raise_registers<kConsumerRegisters>();
    if constexpr (!Config::kWide)
      NarrowConsumer<Config>(p, s).run();
    else if (thread < 2 * kWarpgroup)
      WideKeyConsumer<Config>(p, s).run();
    else
      WideValueConsumer<Config>(p, s).run();
  }
}

/// Stores the sums of dq of one tile, times the scale, as dq. Any number of threads of a CTA call it.
template <class Config>
DISTCA_DEVICE void store_queries(const KernelParams& p, const StoreItem& item, int first, int step) {
  const TaskEntry& task = p.tasks[item.task];
  const float scale = p.scores_of(p.groups[task.group]).scale;
  const int tokens = minimum(p.tile_tokens, task.num_rows - item.tile * p.tile_tokens);
  const float* sums =
      p.dq_sums + int64_t{tile_index(task, item.kv_head, item.tile)} * Config::kParts * Config::kPartElements;
  // Four threads of a warpgroup had eight columns of two rows; one thread writes these.
  constexpr int kGroups = kBoxColumns / 8, kQuads = Config::kPartThreads / 4;
  for (int i = first; i < Config::kParts * kQuads * kGroups; i += step) {
    const int group = i % kGroups, quad = i / kGroups % kQuads, part = i / kGroups / kQuads;
    const float* at = sums + part * Config::kPartElements + group * Config::kPartThreads * 4 + quad * 16;
    const int column = part * kBoxColumns + group * 8;
    if (column >= p.dim) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = quad / 8 * 16 + quad % 8 + 8 * r;
      const int token = row / p.group_heads;
      if (token >= tokens) continue;
      hopper::Words4 words;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words.x[j] = hopper::pack<typename Config::Element>(hopper::product(at[4 * j + 2 * r], scale),
                                                            hopper::product(at[4 * j + 2 * r + 1], scale));
      const int head = item.kv_head * p.group_heads + row % p.group_heads;
      hopper::store_global(address(task.dq, item.tile * p.tile_tokens + token, head) + column * 2, words);
    }
  }
}

}  // namespace distca::attention::cuda
