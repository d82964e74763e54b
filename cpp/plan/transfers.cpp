// The transfers of a plan, in document rows.
#include <algorithm>

#include "plan/plan.h"

namespace distca::plan {

std::vector<Transfer> Plan::transfers() const {
  const Arrangement& arrangement = draft_.arrangement;
  std::vector<Transfer> all;
  const auto add = [&](Phase phase, Direction direction, TensorKind tensor, int64_t home, const Group& g,
                       int64_t document, int64_t begin, int64_t end) {
    const bool in = direction == Direction::kIn;
    const RowFormat format = row_format(options_.heads.with_kv_heads(g.num_kv_heads()), phase, direction, tensor);
    all.push_back({phase, direction, in ? home : g.server, in ? g.server : home, document, begin, end, g.kv_head_begin,
                   g.kv_head_end, tensor, (end - begin) * format.wire_bytes(), g.round});
  };
  for (const Group& g : arrangement.groups) {
    for_each_source(*layout_, arrangement.arrivals_of(g), g, [&](const Placement& rows) {
      for (TensorKind tensor : {TensorKind::kK, TensorKind::kV})
        for (Phase phase : kPhases)
          if (phase == Phase::kForward || !g.is_retained())
            add(phase, Direction::kIn, tensor, rows.rank, g, rows.document, rows.begin - rows.shift,
                rows.end - rows.shift);
    });
  }
  for (const RemoteTask& r : arrangement.remote) {
    const Task& t = draft_.tasks[r.task];
    const auto move = [&](Phase phase, Direction direction, TensorKind tensor) {
      add(phase, direction, tensor, t.home, arrangement.groups[r.group], t.document, t.q_begin, t.q_end);
    };
    move(Phase::kForward, Direction::kIn, TensorKind::kQ);
    for (TensorKind tensor : {TensorKind::kOut, TensorKind::kLse}) move(Phase::kForward, Direction::kOut, tensor);
    for (TensorKind tensor : {TensorKind::kQ, TensorKind::kDout, TensorKind::kLse, TensorKind::kDelta})
      move(Phase::kBackward, Direction::kIn, tensor);
    move(Phase::kBackward, Direction::kOut, TensorKind::kDq);
  }
  for (const KeyGradient& g : arrangement.gradients) {
    const Group& group = arrangement.groups[g.group];
    if (group.server == g.home || g.is_added()) continue;
    for (TensorKind tensor : {g.dk_kind(), g.dv_kind()})
      add(Phase::kBackward, Direction::kOut, tensor, g.home, group, g.document, g.begin - g.shift, g.end - g.shift);
  }
  return all;
}

}  // namespace distca::plan
