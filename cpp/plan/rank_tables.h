// The tables of one rank: what it sends, stores, computes, awaits and adds.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {

/// Everything one rank does in a step; becomes its slice.
struct RankTables {
  std::vector<GroupRow> groups;
  std::vector<TaskRow> tasks;
  std::vector<int64_t> blocks;
  std::vector<GradRow> grads;
  std::vector<SegmentRow> segments;
  std::array<std::vector<SendRow>, 2> sends;
  std::array<std::vector<ReceiveRow>, 2> receives;
  std::array<std::vector<WaitRow>, 2> waits;
};

/// Fills `tables`, which keep their memory, for one rank. Without the blocks, which are most of a slice and follow from
/// the rest, where they are not asked for.
void fill_rank_tables(const Layout& layout, const HeadShape& heads, int64_t key_block_rows, std::span<const Task> tasks,
                      const Arrangement& arrangement, int64_t rank, bool with_blocks, RankTables& tables);

}  // namespace distca::plan
