// Every transfer of a plan between two ranks, in document rows. The four messages of a step are made of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/arrangement.h"

namespace distca::plan {

/// Rows [begin, end) of a document, of one tensor, for a range of key/value heads and the query heads that share them.
struct Transfer {
  Phase phase = Phase::kForward;
  Direction direction = Direction::kIn;
  int64_t source = 0, target = 0;  // ranks
  int64_t document = 0, begin = 0, end = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  TensorKind tensor = TensorKind::kQ;
  int64_t bytes = 0;
};

std::vector<Transfer> list_transfers(const Layout& layout, const HeadShape& heads, std::span<const Task> tasks,
                                     const Arrangement& arrangement);

}  // namespace distca::plan
