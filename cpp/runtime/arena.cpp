#include "runtime/arena.h"

namespace distca::runtime {

using plan::Direction;
using plan::Phase;
using plan::TensorKind;

std::span<const TensorKind> Arena::returned() const {
  static constexpr std::array kForward = {TensorKind::kOut, TensorKind::kLse};
  static constexpr std::array kBackward = {TensorKind::kDq, TensorKind::kDk, TensorKind::kDv};
  if (phase == Phase::kForward) return kForward;
  return kBackward;
}

plan::RowFormat Arena::format(Direction direction, TensorKind kind, const KvHeads& range) const {
  return plan::row_format(heads.with_kv_heads(range.end - range.begin), phase, direction, kind);
}

RowView Arena::in_arena(Direction direction, TensorKind kind, const KvHeads& range, int64_t offset) const {
  const plan::RowFormat f = format(direction, kind, range);
  return {arena + offset, f.row_stride(), f.head_stride};
}

RowView Arena::in_retained(TensorKind kind, const KvHeads& range, int64_t offset) const {
  const plan::RowFormat f = format(Direction::kIn, kind, range);
  return {retained + offset, f.row_stride(), f.head_stride};
}

RowExtent Arena::extent(Direction direction, TensorKind kind, const KvHeads& range, int64_t num_rows) const {
  const plan::RowFormat f = format(direction, kind, range);
  return {num_rows, f.num_heads, f.head_bytes};
}

RowView Arena::local(TensorKind kind, const KvHeads& range, int64_t row) const {
  return local(kind).from(row, plan::has_kv_heads(kind) ? range.begin : range.begin * heads.group_heads());
}

}  // namespace distca::runtime
