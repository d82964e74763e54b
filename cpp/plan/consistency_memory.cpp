// Whether no two things share a byte of an arena or of the retained memory.
#include <algorithm>
#include <compare>
#include <set>
#include <utility>
#include <vector>

#include "common/align.h"
#include "plan/consistency_checker.h"
#include "plan/validate.h"

namespace distca::plan::consistency {

void Checker::check_arena(Phase p) {
  extents_.clear();
  const bool backward = p == Phase::kBackward;
  const auto add = [&](Direction d, TensorKind kind, const Part& part, int64_t offset, int64_t round = kBase) {
    extents_.push_back({round, offset, offset + part.num_rows * stride(p, d, kind, part)});
  };
  std::set<int64_t> pools;  // offsets of k in forward
  for (const GroupRow& g : slice_.groups()) {
    const Part part = heads_of(g, g.num_arena_rows);
    if (part.num_rows == 0 || (backward && g.retained_k >= 0) || !pools.insert(g.forward_k).second) continue;
    add(Direction::kIn, TensorKind::kK, part, backward ? g.backward_k : g.forward_k);
    add(Direction::kIn, TensorKind::kV, part, backward ? g.backward_v : g.forward_v);
  }
  for (const TaskRow& t : slice_.tasks()) {
    if (t.home == h_.rank) continue;
    const Part part = heads_of(slice_.groups()[static_cast<size_t>(t.group)], t.q_end - t.q_begin);
    add(Direction::kIn, TensorKind::kQ, part, backward ? t.backward_q : t.forward_q);
    add(Direction::kIn, TensorKind::kLse, part, backward ? t.backward_lse : t.forward_lse);
    if (!backward) continue;
    add(Direction::kIn, TensorKind::kDout, part, t.backward_dout);
    add(Direction::kIn, TensorKind::kDelta, part, t.backward_delta);
  }
  if (backward) {
    for (const SendRow& s : slice_.sends(p))
      if (const auto kind = static_cast<TensorKind>(s.tensor); kind >= TensorKind::kDk)
        add(Direction::kOut, kind, {0, s.num_rows, s.kv_head_begin, s.kv_head_end}, s.source);
    for (const Move& s : sums_) add(Direction::kOut, static_cast<TensorKind>(s.tensor), s.part, s.offset);
  }
  for (const ReceiveRow& r : slice_.receives(p))
    if (r.peer != h_.rank) add(Direction::kOut, static_cast<TensorKind>(r.tensor), part_of(r), r.source, r.round + 1);
  check_disjoint("arena", h_.arena_bytes[static_cast<size_t>(p)]);
}

void Checker::check_targets(Phase p) {
  struct Target {
    int64_t direction, peer, begin, end, round;
    auto operator<=>(const Target&) const = default;
  };
  std::vector<Target> targets;
  for (const SendRow& s : slice_.sends(p)) {
    const auto d = static_cast<Direction>(s.direction);
    const int64_t bytes = s.num_rows * stride(p, d, static_cast<TensorKind>(s.tensor), part_of(s));
    targets.push_back({s.direction, s.peer, s.target, s.target + bytes, s.round});
  }
  std::sort(targets.begin(), targets.end());
  for (size_t i = 1; i < targets.size(); ++i) {
    const Target &a = targets[i - 1], &b = targets[i];
    if (a.direction != b.direction || a.peer != b.peer) continue;
    check_plan(a.end <= b.begin, "two things are sent to offset ", b.begin, " of the arena of rank ", b.peer);
    check_plan(a.round == b.round || a.direction == static_cast<int64_t>(Direction::kIn), "rows go home to rank ",
               b.peer, " in rounds ", a.round, " and ", b.round);
  }
}

void Checker::check_retained() {
  extents_.clear();
  for (const GroupRow& g : slice_.groups()) {
    if (g.retained_k < 0) continue;
    const Part part = heads_of(g, g.num_arena_rows);
    for (const auto& [kind, at] : {std::pair{TensorKind::kK, g.retained_k}, {TensorKind::kV, g.retained_v}})
      extents_.push_back({kBase, at, at + part.num_rows * stride(Phase::kForward, Direction::kIn, kind, part)});
  }
  check_disjoint("retained memory", h_.retained_bytes);
}

void Checker::check_disjoint(const char* memory, int64_t size) {
  std::sort(extents_.begin(), extents_.end());
  int64_t base_end = 0, end = 0, last = 0, round = kBase;
  for (const Extent& e : extents_) {
    if (e.round != round) {
      if (round == kBase) base_end = end;
      round = e.round;
      end = base_end;
    }
    check_plan(e.begin >= end, "two things lie at offset ", e.begin, " of the ", memory);
    end = e.end;
    last = std::max(last, end);
  }
  const int64_t needed = round_up(last, kExtentAlignment);
  check_plan(needed == size, "it needs ", needed, " bytes of the ", memory, " and says ", size);
}

}  // namespace distca::plan::consistency
