// Lists of tasks: a schedule of somebody else's, checked, and the order and form that plans want.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/scheduler.h"

namespace distca::plan {

/// Rows [q_begin, q_end) of a document and key/value heads [kv_head_begin, kv_head_end), computed by `server`.
struct GivenTask {
  int64_t document = 0;
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  int64_t server = 0;
};

/// The tasks, cut where their rows have several homes. InvalidArgumentError unless they compute every row and head of
/// the layout exactly once, on ranks that serve.
std::vector<Task> task_list(const Layout& layout, const ScheduleOptions& options, std::span<const GivenTask> given);

/// Cuts tasks by heads so that those of one document have equal or disjoint head ranges: then each range is a document
/// of its own to everything that follows. Tasks by (server, document, kv_head_begin, q_begin), and so they stay.
std::vector<Task> with_equal_head_ranges(std::vector<Task> tasks);

}  // namespace distca::plan
