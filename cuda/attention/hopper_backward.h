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
//   tile_stages           q, dout, lse, delta, visible of a tile: 32 lanes and bytes / 8 warps after wait_groups<0>,
//                         or, with one stage, those of dq once dv is computed
//   loaded                bytes of a block that is cleared before it is full
//   named kScoresWritten  dscores[stage] of step i is written (after fence_shared), and both warpgroups may read it.
//                         When both pass it at step i + 1, both have read that of step i, because wait_groups<0> of
//                         step i comes before. Therefore it may be written at step i + 2
//   named kScoresRead     with one stage of tiles, and one dscores: the warpgroup of dq has multiplied all of it. It
//                         gives one turn more at the start, which the other one takes at the end
//   dq.stages[i]          every other part of dq: 4 consumer warps, each after fence_shared / the lane that adds it,
//                         once the copy engine has read it
//   named kQueryTurn      within the warpgroup that adds dq itself: its turn has come; all its adds are done
//   named kFirst/SecondStore  within a warpgroup: its turn to store dk or dv has come; it has stored them
#pragma once

#include "attention/hopper_consumer.h"

namespace distca::attention::cuda {

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
    if constexpr (Config::kReleasesEarly) hopper::sync_named(kScoresRead, kConsumers);  // takes the last one back
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
    if constexpr (Config::kReleasesEarly) hopper::arrive_named(kScoresRead, kConsumers);
    for (int index; (index = begin_item(s.items, this->items)) < p.num_items(); end_item(s.items, this->items)) {
      clear(dv);
      this->template for_each_tile<!Config::kReleasesEarly>(
          p.items[index].num_tiles, [&](const TileFacts<Config::kRows>& facts) { step(facts); });
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
    if constexpr (Config::kReleasesEarly)
      release_and_hand_over(facts);
    else if constexpr (Config::kHandsOver)
      hand_over(facts);
    else
      add(facts);
    hopper::pin(dv);
    hopper::pin(probs);
  }

  /// While one part is handed over, the next one is multiplied.
  DISTCA_DEVICE void hand_over(const TileFacts<Config::kRows>& facts) {
    float dq[2][32];
    this->multiply_queries(0, dq[0]);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      if (part + 1 < Config::kParts) {
        this->multiply_queries(part + 1, dq[(part + 1) % 2]);
        hopper::wait_groups<1>();
      } else {
        hopper::wait_groups<0>();
      }
      hopper::pin(dq[part % 2]);
      this->hand_over_queries(facts, part, dq[part % 2]);
    }
  }

  /// The tile is released once dv is computed. There are no registers for two parts.
  DISTCA_DEVICE void release_and_hand_over(const TileFacts<Config::kRows>& facts) {
    const DqFacts of_dq{facts.dq_sums, facts.turns, facts.blocks_before};
#pragma unroll
    for (int part = 0; part < Config::kPartsOfPass; ++part) {
      float dq[32];
      this->multiply_queries(part, dq);
      if (part == 0) {
        hopper::wait_groups<1>();
        release(s.tile_stages.empty[tiles.stage()]);
      }
      hopper::wait_groups<0>();
      hopper::pin(dq);
      if (part + 1 == Config::kPartsOfPass) hopper::arrive_named(kScoresRead, kConsumers);
      this->hand_over_queries(of_dq, part, dq);
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
