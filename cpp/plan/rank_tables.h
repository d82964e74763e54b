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

/// Leaves a row that `emplace_back()` adds uninitialised: it is assigned at once, in its place.
template <class Row>
struct RowAllocator : std::allocator<Row> {
  void construct(Row* row) noexcept { ::new (static_cast<void*>(row)) Row; }
};
template <class Row>
using Rows = std::vector<Row, RowAllocator<Row>>;

/// Everything one rank does in a step; becomes its slice.
struct RankTables {
  Rows<GroupRow> groups;
  Rows<TaskRow> tasks;
  Rows<int64_t> blocks;
  Rows<GradRow> grads;
  Rows<SegmentRow> segments;
  std::array<Rows<SendRow>, 2> sends;
  std::array<Rows<ReceiveRow>, 2> receives;
  std::array<Rows<WaitRow>, 2> waits;
};

/// Fills `tables`, which keep their memory, for one rank. Without the blocks, which are most of a slice and follow from
/// the rest, where they are not asked for.
void fill_rank_tables(const Layout& layout, const HeadShape& heads, int64_t key_block_rows, std::span<const Task> tasks,
                      const Arrangement& arrangement, int64_t rank, bool with_blocks, RankTables& tables);

}  // namespace distca::plan
