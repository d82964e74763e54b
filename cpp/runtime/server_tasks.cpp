#include "runtime/server_tasks.h"

#include <algorithm>
#include <functional>

namespace distca::runtime {

using plan::Direction;
using plan::Phase;
using plan::TensorKind;

namespace {

attention::Task task_of(const plan::SliceView& slice, const Arena& arena, const plan::TaskRow& t) {
  const KvHeads heads = heads_of(slice.groups()[static_cast<size_t>(t.group)]);
  const auto rows = [&](TensorKind kind, int64_t offset) {
    return t.home == slice.header().rank ? arena.local(kind, heads, t.home_row)
                                         : arena.in_arena(Direction::kIn, kind, heads, offset);
  };
  attention::Task task;
  task.q_begin = t.q_begin;
  task.q_end = t.q_end;
  if (arena.phase == Phase::kBackward) {
    task.q = rows(TensorKind::kQ, t.backward_q);
    task.lse = rows(TensorKind::kLse, t.backward_lse);
    task.dout = rows(TensorKind::kDout, t.backward_dout);
    task.delta = rows(TensorKind::kDelta, t.backward_delta);
    task.dq = rows(TensorKind::kDq, t.backward_dout);  // over dout in the arena
  } else {
    task.q = rows(TensorKind::kQ, t.forward_q);
    task.out = rows(TensorKind::kOut, t.forward_q);  // over q in the arena
    task.lse = rows(TensorKind::kLse, t.forward_lse);
    if (arena.max_logits.is_asked())
      task.max_logits = arena.max_logits.found_for(t.home) + heads.begin * arena.heads.group_heads();
  }
  return task;
}

}  // namespace

attention::Problem ServerTasks::problem(const plan::SliceView& slice, const Arena& arena, const ScoreOptions& scores,
                                        Rounds rounds) {
  const auto from = [&](int64_t round) {
    return std::ranges::lower_bound(slice.groups(), round, std::ranges::less(), &plan::GroupRow::round);
  };
  const auto begin = from(rounds.begin);
  const std::span<const plan::GroupRow> groups(begin, from(rounds.end));
  const int64_t first_group = begin - slice.groups().begin();
  const int64_t first_task = groups.empty() ? 0 : groups.front().task_begin;
  const auto tasks = slice.tasks().subspan(
      static_cast<size_t>(first_task), groups.empty() ? 0 : static_cast<size_t>(groups.back().task_end - first_task));

  grads_.clear();
  if (arena.phase == Phase::kBackward) grads_.reserve(slice.grads().size());  // spans into it are taken below
  groups_.clear();
  for (const plan::GroupRow& g : groups) {
    attention::KeyGroup group = key_group(slice, arena, g);
    group.task_begin = g.task_begin - first_task;
    group.task_end = g.task_end - first_task;
    groups_.push_back(group);
  }
  tasks_.clear();
  for (const plan::TaskRow& t : tasks) {
    tasks_.push_back(task_of(slice, arena, t));
    tasks_.back().group = t.group - first_group;
  }
  scores_.clear();
  for (const plan::ScoresRow& s : slice.scores()) {
    scores_.push_back({s.mask(), s.scale == plan::kOfTheCall ? scores.scale : plan::score_value(s.scale),
                       s.softcap == plan::kOfTheCall ? scores.softcap : plan::score_value(s.softcap)});
  }
  return {arena.heads, scores_, groups_, tasks_, scores.deterministic};
}

attention::KeyGroup ServerTasks::key_group(const plan::SliceView& slice, const Arena& arena, const plan::GroupRow& g) {
  const bool backward = arena.phase == Phase::kBackward;
  const KvHeads heads = heads_of(g);
  attention::KeyGroup group;
  group.kv_heads = heads.end - heads.begin;
  group.scores = g.scores;
  group.bidirectional = slice.bidirectional_of(g);
  group.kv_begin = g.kv_begin;
  group.kv_end = g.kv_end;
  group.first_block = g.first_block;
  group.blocks = slice.blocks().subspan(static_cast<size_t>(g.block_begin), static_cast<size_t>(g.num_blocks));
  group.k[0] = arena.local(TensorKind::kK, heads, 0);
  group.v[0] = arena.local(TensorKind::kV, heads, 0);
  if (backward && g.retained_k >= 0) {
    group.k[1] = arena.in_retained(TensorKind::kK, heads, g.retained_k);
    group.v[1] = arena.in_retained(TensorKind::kV, heads, g.retained_v);
  } else if (g.num_arena_rows > 0) {
    group.k[1] = arena.in_arena(Direction::kIn, TensorKind::kK, heads, backward ? g.backward_k : g.forward_k);
    group.v[1] = arena.in_arena(Direction::kIn, TensorKind::kV, heads, backward ? g.backward_v : g.forward_v);
  }
  if (backward) group.grads = add_gradient_runs(slice, arena, g);
  return group;
}

std::span<const attention::KeyGradRun> ServerTasks::add_gradient_runs(const plan::SliceView& slice, const Arena& arena,
                                                                      const plan::GroupRow& g) {
  const size_t first = grads_.size();
  const KvHeads heads = heads_of(g);
  for (const plan::GradRow& r :
       slice.grads().subspan(static_cast<size_t>(g.grad_begin), static_cast<size_t>(g.grad_end - g.grad_begin))) {
    attention::KeyGradRun run{r.begin, r.end, arena.heads.dtype, {}, {}, false};
    const auto target = static_cast<plan::GradTarget>(r.target);
    if (target == plan::GradTarget::kReturned) {
      run.dk = arena.local(TensorKind::kDk, heads, r.row);
      run.dv = arena.local(TensorKind::kDv, heads, r.row);
    } else {
      const bool narrow = target == plan::GradTarget::kArena;
      if (!narrow) run.dtype = DType::kFloat32;
      run.dk = arena.in_arena(Direction::kOut, narrow ? TensorKind::kDk : TensorKind::kDkPartial, heads, r.dk);
      run.dv = arena.in_arena(Direction::kOut, narrow ? TensorKind::kDv : TensorKind::kDvPartial, heads, r.dv);
      run.is_added = target == plan::GradTarget::kAdded;
    }
    grads_.push_back(run);
  }
  return std::span(grads_).subspan(first);
}

}  // namespace distca::runtime
