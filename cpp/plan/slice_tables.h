// The tables of one rank: what it sends, stores, computes, awaits and adds.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {

/// An allocator that leaves a row of `emplace_back()` uninitialised, because the row is assigned in its place at once.
template <class Row>
struct RowAllocator : std::allocator<Row> {
  void construct(Row* row) noexcept { ::new (static_cast<void*>(row)) Row; }
};
template <class Row>
using Rows = std::vector<Row, RowAllocator<Row>>;

/// Everything that one rank does in a step. Its slice is made from this.
struct SliceTables {
  std::vector<ScoresRow> scores;
  Rows<SharedRows> shared;
  std::vector<BidirectionalRows> bidirectional;  // of each document that has a group, ascending
  Rows<GroupRow> groups;
  Rows<TaskRow> tasks;
  Rows<int64_t> blocks;
  Rows<GradRow> grads;
  Rows<SegmentRow> segments;
  std::array<Rows<SendRow>, 2> sends;
  std::array<Rows<ReceiveRow>, 2> receives;
  std::array<Rows<WaitRow>, 2> waits;
};

/// Fills `tables` for one rank; they keep their memory from call to call. Without `with_blocks` the block table is left
/// out, because it is most of a slice and follows from the rest.
void fill_slice_tables(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks,
                       const Arrangement& arrangement, int64_t rank, bool with_blocks, SliceTables& tables);

}  // namespace distca::plan
