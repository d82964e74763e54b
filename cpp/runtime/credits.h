// The credit that a rank has given and may rely on, by slot and peer.
//
// A receiver grants credit when it comes to a step. Peers that sent rows here in the slot's previous use need no
// credit: they were told at the end of that use that the slot is free. Their rows may be under way before the receiver
// comes to the step. Who these peers are follows from the plans of both steps; therefore sender and receiver agree
// without a message.
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

  /// Says that a step uses the slot from here on.
  void use(int64_t slot, uint64_t step) {
    Use& use = uses_[static_cast<size_t>(slot)];
    use = {.step = step, .before = use.step};
  }

  /// Says that credit up to this sequence number is given to the peer. Returns false if the peer has it already.
  bool give(int64_t slot, int64_t peer, uint64_t value) {
    uint64_t& given = cell(slot, peer).given;
    if (given >= value) return false;
    given = value;
    return true;
  }

  /// Says that the peer sends rows here in the slot's step.
  void receive(int64_t slot, int64_t peer) { cell(slot, peer).received = step(slot); }
  bool receives(int64_t slot, int64_t peer) const { return is(cell(slot, peer).received, step(slot)); }
  /// Whether the peer sent rows here in the slot's previous step, and `receive` has not been called for the current
  /// one. Such a peer may send here without more credit.
  bool received_before(int64_t slot, int64_t peer) const { return is(cell(slot, peer).received, before(slot)); }

  /// Whether `send` was called for this peer in the slot's step.
  bool sends(int64_t slot, int64_t peer) const { return is(cell(slot, peer).sent, step(slot)); }
  /// Says that this rank sends rows to the peer in the slot's step. Returns the step of this slot in which it did so
  /// last, or 0 for never. After that step the peer tells this rank that its slot is free.
  uint64_t send(int64_t slot, int64_t peer) { return std::exchange(cell(slot, peer).sent, step(slot)); }
  /// The step that used the slot before the current one, or 0 for none.
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
