// What a rank knows of credit, by slot and peer.
//
// A receiver grants credit when it comes to a step. To peers that sent rows here in the slot's use before, it has said
// by then that the slot is free: they need no more, and rows of the step may be under way before the receiver comes to
// it. Both sides know who that is, for it follows from the plans of both steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/signals.h"

namespace distca::runtime {

class Credits {
 public:
  explicit Credits(int64_t num_ranks = 0) : num_ranks_(num_ranks), cells_(static_cast<size_t>(kNumSlots * num_ranks)) {}

  /// The slot is used by a step, from here on.
  void use(int64_t slot, uint64_t step) {
    Use& use = uses_[static_cast<size_t>(slot)];
    use = {.step = step, .before = use.step};
  }

  /// Credit up to this sequence number is given to the peer; false where it has it already.
  bool give(int64_t slot, int64_t peer, uint64_t value) {
    uint64_t& given = cell(slot, peer).given;
    if (given >= value) return false;
    given = value;
    return true;
  }

  /// The peer sends rows here in the slot's step.
  void receive(int64_t slot, int64_t peer) { cell(slot, peer).received = step(slot); }
  bool receives(int64_t slot, int64_t peer) const { return is(cell(slot, peer).received, step(slot)); }
  /// Whether it did so in the step before that one, and has not been entered for this one: it may send here without
  /// more credit.
  bool received_before(int64_t slot, int64_t peer) const { return is(cell(slot, peer).received, before(slot)); }

  /// This rank sends rows to the peer in the slot's step. Returns in which it did last: it has been, or will be, told
  /// that the peer's slot is free after that; 0: never.
  uint64_t send(int64_t slot, int64_t peer) { return std::exchange(cell(slot, peer).sent, step(slot)); }
  /// The step that used the slot before the one that does; 0: none.
  uint64_t before(int64_t slot) const { return uses_[static_cast<size_t>(slot)].before; }

 private:
  struct Use {
    uint64_t step = 0, before = 0;
  };
  struct Cell {
    uint64_t given = 0, received = 0, sent = 0;
  };

  static bool is(uint64_t step, uint64_t one) { return one != 0 && step == one; }
  uint64_t step(int64_t slot) const { return uses_[static_cast<size_t>(slot)].step; }
  Cell& cell(int64_t slot, int64_t peer) { return cells_[static_cast<size_t>(slot * num_ranks_ + peer)]; }
  const Cell& cell(int64_t slot, int64_t peer) const { return cells_[static_cast<size_t>(slot * num_ranks_ + peer)]; }

  int64_t num_ranks_;
  std::array<Use, kNumSlots> uses_ = {};
  std::vector<Cell> cells_;
};

}  // namespace distca::runtime
