// The meaning of a rank's signal words. Words marked "of peer p" are written by p alone.
#pragma once

#include <cstdint>

#include "plan/origin.h"
#include "plan/tables.h"
#include "transport/stream_order.h"

namespace distca::runtime {

using transport::kNumSlots;

class Signals {
 public:
  explicit Signals(int64_t num_ranks) : num_ranks_(num_ranks) {}

  /// Of peer p: we may write into p's slot in this step and round.
  int64_t credit(int64_t slot, int64_t peer) const { return per_peer(kKinds * slot, peer); }
  /// Of peer p: p's slot is free again after this step, in which we sent rows there.
  int64_t freed(int64_t slot, int64_t peer) const { return per_peer(kKinds * slot + 1, peer); }
  /// Of peer p: p's rows of the out message of this step and round have arrived. A home gives credit for each round; so
  /// no two signals to the word are under way at once.
  int64_t arrived_home(int64_t slot, int64_t peer) const { return per_peer(kKinds * slot + 2, peer); }
  /// Of peer p: p's rows of the in message of this step and round have arrived. Several rounds may be under way at
  /// once; so each has a word.
  int64_t arrived(int64_t slot, int64_t round, int64_t peer) const { return per_peer(kKinds * slot + 3 + round, peer); }
  /// Of peer p: p has met a fault. There are kFaultDetails words of detail, then kTextWords of text, then the code (0:
  /// none).
  int64_t fault_detail(int64_t peer, int64_t index) const { return per_peer(kKinds * kNumSlots + index, peer); }
  int64_t fault_text(int64_t peer, int64_t index) const { return fault_detail(peer, kFaultDetails + index); }
  int64_t fault_code(int64_t peer) const { return fault_text(peer, kTextWords); }
  /// Published by the owner for its peers, for each of the last kHistory calls: the digest of the plan of the call's
  /// step, what else its ranks must agree on (ScoreOptions::options_word), its layer (layer.h), the forward step whose
  /// gradients it computes (StepId::forward_step), and which call it is (call_word).
  int64_t digest(uint64_t call) const { return published(kWords * static_cast<int64_t>(call % kHistory)); }
  int64_t options_word(uint64_t call) const { return digest(call) + 1; }
  int64_t layer(uint64_t call) const { return digest(call) + 2; }
  int64_t forward_step(uint64_t call) const { return digest(call) + 3; }
  int64_t call(uint64_t call) const { return digest(call) + 4; }
  static constexpr int64_t kHistory = 64, kWords = 5;
  /// Published by the owner: the number of its latest step.
  int64_t latest_step() const { return published(kWords * kHistory); }

  /// Published by the owner, for some of its latest plans: the digest, which is 0 while the rest changes, and the
  /// origin (plan/origin.h).
  int64_t described_plan(int64_t index) const { return published(kWords * kHistory + 1 + kPlanWords * index); }
  static constexpr int64_t kDescribedPlans = 8, kPlanWords = 1 + std::tuple_size_v<plan::Origin>;

  int64_t count() const { return described_plan(kDescribedPlans); }

  static constexpr int64_t kFaultDetails = 5, kTextWords = 32;

 private:
  static constexpr int64_t kKinds = 3 + plan::kMaxRoundsIn;
  int64_t per_peer(int64_t kind, int64_t peer) const { return kind * num_ranks_ + peer; }
  int64_t published(int64_t index) const { return fault_code(num_ranks_) + index; }

  int64_t num_ranks_;
};

/// Sequence numbers are written, not added, and awaited with >=. Steps count from 1.
constexpr uint64_t sequence(uint64_t step, int64_t round) { return step << 16 | static_cast<uint64_t>(round); }

}  // namespace distca::runtime
