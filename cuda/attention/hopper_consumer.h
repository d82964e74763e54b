// Backward of core attention: what its consumers have in common. The consumers themselves are in hopper_backward.h.
#pragma once

#include "attention/hopper_backward_parts.h"

namespace distca::attention::cuda {

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

  /// Calls step(facts) for each tile that sees the item's keys and releases it, unless the step does; and the keys at
  /// the end.
  template <bool kReleases = true, class Step>
  DISTCA_DEVICE void for_each_tile(int num_tiles, const Step& step) {
    s.key_stages.full[0].wait(items.uses % 2);
#pragma unroll 1
    for (const int end = tiles.uses + num_tiles; tiles.uses < end;) {
      s.tile_stages.full[tiles.stage()].wait(tiles.parity());
      step(s.facts[tiles.stage()]);
      if constexpr (kReleases) release(s.tile_stages.empty[tiles.stage()]);
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
    if constexpr (kMapped) map_scores(p.scores[facts.scores].map, scores);
    if constexpr (!kMapped || !kGradients) exponentials<kMasked>(facts);
    if constexpr (kGradients) {
      hopper::stay_behind(scores, &s.nowhere);
      hopper::wait_groups<0>();
      hopper::pin(dprobs);
      subtract_delta(facts);
      if constexpr (kMapped) {
        scale_by_slope(p.scores[facts.scores].map, scores, dprobs);
        exponentials<kMasked>(facts);
      }
      store_gradients();
    }
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
  DISTCA_DEVICE void store_gradients() {
    if constexpr (Config::kReleasesEarly) hopper::sync_named(kScoresRead, kConsumers);
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

  /// Hands a part of the tile's dq to the warp that adds it. Of the facts it takes those of dq.
  template <class Facts>
  DISTCA_DEVICE void hand_over_queries(const Facts& facts, int part, const float (&dq)[32]) {
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
    const auto first_key = [&] { return item.index * kKeys + first_key_of_thread(); };
    store_key<Element, 0>(p, item, first_key, sums, factor, pass() * 2 * kSums, columns, view);
    store_key<Element, 1>(p, item, first_key, sums, factor, pass() * 2 * kSums, columns, view);
  }
};

}  // namespace distca::attention::cuda
