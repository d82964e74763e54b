// The in-place buffer manager of a step: where its rows lie on this rank. The planner's Arranger has chosen the
// offsets, which the slice of the plan says. Here they become addresses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/dtype.h"
#include "common/error.h"
#include "common/rows.h"
#include "plan/tables.h"
#include "runtime/max_logits.h"

namespace distca::runtime {

/// A range of key/value heads; query heads follow from it.
struct KvHeads {
  int64_t begin = 0, end = 0;
};
template <class Row>
KvHeads heads_of(const Row& row) {
  return {row.kv_head_begin, row.kv_head_end};
}

/// The places of a step's rows: in the arena of its slot, in this rank's tensors, and in the memory that it retains.
struct DISTCA_EXPORT Arena {
  plan::Phase phase = plan::Phase::kForward;
  HeadShape heads;
  std::byte* arena = nullptr;
  std::byte* retained = nullptr;
  MaxLogits max_logits;
  /// The place of each tensor of this rank, by TensorKind. Null if the step does not have the tensor.
  std::array<RowView, static_cast<size_t>(plan::TensorKind::kCount)> tensors = {};

  /// The kinds of the tensors that the step returns.
  std::span<const plan::TensorKind> returned() const;
  KvHeads all_heads() const { return {0, heads.kv_heads}; }
  /// The format of rows of a range of heads in an arena.
  plan::RowFormat format(plan::Direction direction, plan::TensorKind kind, const KvHeads& range) const;
  RowView in_arena(plan::Direction direction, plan::TensorKind kind, const KvHeads& range, int64_t offset) const;
  /// Keys or values in the retained memory, where they lie as in the arena of a forward step.
  RowView in_retained(plan::TensorKind kind, const KvHeads& range, int64_t offset) const;
  RowExtent extent(plan::Direction direction, plan::TensorKind kind, const KvHeads& range, int64_t num_rows) const;
  void set(plan::TensorKind kind, const RowView& view) { tensors[static_cast<size_t>(kind)] = view; }
  const RowView& local(plan::TensorKind kind) const { return tensors[static_cast<size_t>(kind)]; }
  /// A tensor of this rank, from a row on and from the first head of the range on.
  RowView local(plan::TensorKind kind, const KvHeads& range, int64_t row) const;
};

}  // namespace distca::runtime
