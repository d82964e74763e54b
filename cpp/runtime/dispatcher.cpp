#include "runtime/dispatcher.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace distca::runtime {

using plan::Direction;
using plan::Phase;
using plan::TensorKind;

namespace {

float* float_at(const RowView& view, int64_t row, int64_t head) { return reinterpret_cast<float*>(view.at(row, head)); }

/// sum (+)= partial, over [rows, heads, dim] fp32.
void accumulate(const RowView& sum, const RowView& partial, const RowExtent& n, bool assign) {
  if (assign) {
    copy_rows(sum, partial, n);
    return;
  }
  const int64_t dim = n.head_bytes / 4;
  for (int64_t i = 0; i < n.num_rows; ++i) {
    for (int64_t h = 0; h < n.num_heads; ++h) {
      float* to = float_at(sum, i, h);
      const float* from = float_at(partial, i, h);
      for (int64_t d = 0; d < dim; ++d) to[d] += from[d];
    }
  }
}

void cast_rows(const RowView& to, DType dtype, const RowView& from, const RowExtent& n) {
  if (dtype == DType::kFloat32) {
    copy_rows(to, from, n);
    return;
  }
  const int64_t dim = n.head_bytes / 4;
  for (int64_t i = 0; i < n.num_rows; ++i) {
    for (int64_t h = 0; h < n.num_heads; ++h) {
      auto* out = reinterpret_cast<uint16_t*>(to.at(i, h));
      const float* in = float_at(from, i, h);
      for (int64_t d = 0; d < dim; ++d)
        out[d] = dtype == DType::kBFloat16 ? float_to_bf16(in[d]) : float_to_fp16(in[d]);
    }
  }
}

void fill_bytes(const RowView& view, const RowExtent& n, int byte) {
  for (int64_t i = 0; i < n.num_rows; ++i)
    for (int64_t h = 0; h < n.num_heads; ++h) std::memset(view.at(i, h), byte, static_cast<size_t>(n.head_bytes));
}

constexpr int kNanByte = 0xff;  // all ones is a NaN in every dtype

}  // namespace

void Dispatcher::forward(const plan::SliceView& slice, const ForwardTensors& t, const ScoreOptions& scores,
                         const Parallel& parallel) {
  local_ = {};
  const auto set = [&](TensorKind kind, const RowView& view) { local_[static_cast<size_t>(kind)] = view; };
  set(TensorKind::kQ, t.q);
  set(TensorKind::kK, t.k);
  set(TensorKind::kV, t.v);
  set(TensorKind::kOut, t.out);
  set(TensorKind::kLse, t.lse);
  run(slice, Phase::kForward, scores, parallel);
}

void Dispatcher::backward(const plan::SliceView& slice, const BackwardTensors& t, const ScoreOptions& scores,
                          const Parallel& parallel) {
  local_ = {};
  const auto set = [&](TensorKind kind, const RowView& view) { local_[static_cast<size_t>(kind)] = view; };
  const plan::Header& h = slice.header();
  delta_.resize(std::max(delta_.size(), static_cast<size_t>(h.num_rows * h.q_heads)));
  const RowView delta = {reinterpret_cast<std::byte*>(delta_.data()), h.q_heads * 4, 4};
  attention::row_dot(slice.heads(), h.num_rows, t.out, t.dout, delta, parallel);
  set(TensorKind::kQ, t.q);
  set(TensorKind::kK, t.k);
  set(TensorKind::kV, t.v);
  set(TensorKind::kLse, t.lse);
  set(TensorKind::kDout, t.dout);
  set(TensorKind::kDelta, delta);
  set(TensorKind::kDq, t.dq);
  set(TensorKind::kDk, t.dk);
  set(TensorKind::kDv, t.dv);
  run(slice, Phase::kBackward, scores, parallel);
}

void Dispatcher::run(const plan::SliceView& slice, Phase phase, const ScoreOptions& scores, const Parallel& parallel) {
  open(slice, phase, scores);
  dispatch(slice);
  protocol_.exchange(/*more=*/true);
  attend(slice, scores, /*local=*/true, parallel);
  for (const plan::WaitRow& w : slice.waits(phase))
    if (w.direction == static_cast<int64_t>(Direction::kIn)) protocol_.await_rows(Direction::kIn, w.peer, w.round);
  attend(slice, scores, /*local=*/false, parallel);
  collect(slice);
  if (phase == Phase::kBackward) finish_sums(slice);
  fill_padding(slice);
  protocol_.end();
}

void Dispatcher::open(const plan::SliceView& slice, Phase phase, const ScoreOptions& scores) {
  phase_ = phase;
  heads_ = slice.heads();
  protocol_.begin(phase, static_cast<uint64_t>(slice.header().plan_digest), scores);
  arena_ = protocol_.arena();
  if (fill_with_nan_) fill_nan(slice);
  protocol_.grant(slice.waits(phase));
}

/// Rows of this home go to their servers' arenas; rows that this server assembles from its own tensor are copied.
void Dispatcher::dispatch(const plan::SliceView& slice) {
  int64_t open_peer = -1;
  const auto close = [&] {
    if (open_peer >= 0) protocol_.announce(Direction::kIn, open_peer, 0);
    open_peer = -1;
  };
  for (const plan::SendRow& s : slice.sends(phase_)) {
    if (s.direction != static_cast<int64_t>(Direction::kIn)) break;
    const auto kind = static_cast<TensorKind>(s.tensor);
    const KvHeads heads = heads_of(s);
    const RowView source = local(kind, heads, s.row);
    const RowExtent n = extent(Direction::kIn, kind, heads, s.num_rows);
    if (s.peer == protocol_.rank()) {
      copy_rows(in_arena(Direction::kIn, kind, heads, s.target), source, n);
      continue;
    }
    if (s.peer != open_peer) {
      close();
      protocol_.await_credit(Direction::kIn, s.peer, 0);
      open_peer = s.peer;
    }
    const plan::RowFormat f = format(Direction::kIn, kind, heads);
    protocol_.put(s.peer, s.target, f.row_stride(), f.head_stride, source, n);
  }
  close();
}

/// Computes the groups that need no row of another rank, or the others.
void Dispatcher::attend(const plan::SliceView& slice, const ScoreOptions& scores, bool local_part,
                        const Parallel& parallel) {
  const plan::Header& h = slice.header();
  const auto local_groups = static_cast<size_t>(h.num_local_groups);
  const auto local_tasks = static_cast<size_t>(h.num_local_tasks);
  const auto groups = local_part ? slice.groups().first(local_groups) : slice.groups().subspan(local_groups);
  const auto tasks = local_part ? slice.tasks().first(local_tasks) : slice.tasks().subspan(local_tasks);
  if (groups.empty()) return;
  const int64_t first_group = local_part ? 0 : h.num_local_groups, first_task = local_part ? 0 : h.num_local_tasks;
  const bool backward = phase_ == Phase::kBackward;

  grads_.clear();
  if (backward) grads_.reserve(slice.grads().size());  // spans into it are taken below
  groups_.clear();
  for (const plan::GroupRow& g : groups) {
    attention::KeyGroup group;
    const KvHeads heads = heads_of(g);
    group.kv_heads = heads.end - heads.begin;
    group.kv_begin = g.kv_begin;
    group.kv_end = g.kv_end;
    group.first_block = g.first_block;
    group.blocks = slice.blocks().subspan(static_cast<size_t>(g.block_begin), static_cast<size_t>(g.num_blocks));
    group.k[0] = local(TensorKind::kK, heads, 0);
    group.v[0] = local(TensorKind::kV, heads, 0);
    if (g.num_arena_blocks > 0) {
      group.k[1] = in_arena(Direction::kIn, TensorKind::kK, heads, backward ? g.backward_k : g.forward_k);
      group.v[1] = in_arena(Direction::kIn, TensorKind::kV, heads, backward ? g.backward_v : g.forward_v);
    }
    if (!scores.sinks.empty()) group.sinks = scores.sinks.data() + heads.begin * heads_.group_heads();
    group.task_begin = g.task_begin - first_task;
    group.task_end = g.task_end - first_task;
    if (backward) group.grads = add_gradient_runs(slice, g);
    groups_.push_back(group);
  }
  tasks_.clear();
  for (const plan::TaskRow& t : tasks) {
    const KvHeads heads = heads_of(slice.groups()[static_cast<size_t>(t.group)]);
    const auto rows = [&](TensorKind kind, int64_t offset) {
      return t.home == h.rank ? local(kind, heads, t.home_row) : in_arena(Direction::kIn, kind, heads, offset);
    };
    attention::Task task;
    task.group = t.group - first_group;
    task.q_begin = t.q_begin;
    task.q_end = t.q_end;
    if (backward) {
      task.q = rows(TensorKind::kQ, t.backward_q);
      task.lse = rows(TensorKind::kLse, t.backward_lse);
      task.dout = rows(TensorKind::kDout, t.backward_dout);
      task.delta = rows(TensorKind::kDelta, t.backward_delta);
      task.dq = rows(TensorKind::kDq, t.backward_dout);  // over dout in the arena
    } else {
      task.q = rows(TensorKind::kQ, t.forward_q);
      task.out = rows(TensorKind::kOut, t.forward_q);  // over q in the arena
      task.lse = rows(TensorKind::kLse, t.forward_lse);
    }
    tasks_.push_back(task);
  }
  const attention::Problem problem{heads_, slice.mask(), scores.scale, groups_, tasks_, scores.softcap};
  if (backward)
    kernel_.backward(problem, parallel);
  else
    kernel_.forward(problem, parallel);
}

std::span<const attention::KeyGradRun> Dispatcher::add_gradient_runs(const plan::SliceView& slice,
                                                                     const plan::GroupRow& g) {
  const size_t first = grads_.size();
  const KvHeads heads = heads_of(g);
  for (const plan::GradRow& r :
       slice.grads().subspan(static_cast<size_t>(g.grad_begin), static_cast<size_t>(g.grad_end - g.grad_begin))) {
    attention::KeyGradRun run{r.begin, r.end, heads_.dtype, {}, {}};
    const auto target = static_cast<plan::GradTarget>(r.target);
    if (target == plan::GradTarget::kReturned) {
      run.dk = local(TensorKind::kDk, heads, r.row);
      run.dv = local(TensorKind::kDv, heads, r.row);
    } else {
      const bool partial = target == plan::GradTarget::kPartial;
      if (partial) run.dtype = DType::kFloat32;
      run.dk = in_arena(Direction::kOut, partial ? TensorKind::kDkPartial : TensorKind::kDk, heads, r.dk);
      run.dv = in_arena(Direction::kOut, partial ? TensorKind::kDvPartial : TensorKind::kDv, heads, r.dv);
    }
    grads_.push_back(run);
  }
  return std::span(grads_).subspan(first);
}

/// Results go home, round by round. A home grants round j + 1 after it took in round j, and every rank sends its
/// round-j rows before it waits for those of its own round j; so, by induction over j, no rank waits for ever. Where
/// ranks exchange rows together, all of them go on as long as one has a round left.
void Dispatcher::collect(const plan::SliceView& slice) {
  int64_t rounds = slice.header().num_rounds;
  for (const plan::SendRow& s : slice.sends(phase_)) rounds = std::max(rounds, s.round + 1);
  bool more = true;
  for (int64_t round = 0; more; ++round) {
    if (round > 0) protocol_.grant_round(slice.waits(phase_), round);
    send_home(slice, round);
    more = protocol_.exchange(round + 1 < rounds);
    receive_home(slice, round);
  }
}

void Dispatcher::send_home(const plan::SliceView& slice, int64_t round) {
  int64_t open_peer = -1;
  const auto close = [&] {
    if (open_peer >= 0) protocol_.announce(Direction::kOut, open_peer, round);
    open_peer = -1;
  };
  for (const plan::SendRow& s : slice.sends(phase_)) {
    if (s.direction != static_cast<int64_t>(Direction::kOut) || s.round != round) continue;
    if (s.peer != open_peer) {
      close();
      protocol_.await_credit(Direction::kOut, s.peer, round);
      open_peer = s.peer;
    }
    const auto kind = static_cast<TensorKind>(s.tensor);
    const KvHeads heads = heads_of(s);
    const plan::RowFormat f = format(Direction::kOut, kind, heads);
    protocol_.put(s.peer, s.target, f.row_stride(), f.head_stride, in_arena(Direction::kIn, kind, heads, s.source),
                  extent(Direction::kOut, kind, heads, s.num_rows));
  }
  close();
}

void Dispatcher::receive_home(const plan::SliceView& slice, int64_t round) {
  for (const plan::WaitRow& w : slice.waits(phase_)) {
    if (w.direction == static_cast<int64_t>(Direction::kOut) && w.round == round)
      protocol_.await_rows(Direction::kOut, w.peer, round);
  }
  for (const plan::ReceiveRow& r : slice.receives(phase_)) {
    if (r.round != round) continue;
    const auto kind = static_cast<TensorKind>(r.tensor);
    const KvHeads heads = heads_of(r);
    const RowView source = in_arena(Direction::kOut, kind, heads, r.source);
    const RowExtent n = extent(Direction::kOut, kind, heads, r.num_rows);
    const auto action = static_cast<plan::ReceiveAction>(r.action);
    if (action == plan::ReceiveAction::kCopy)
      copy_rows(local(kind, heads, r.row), source, n);
    else
      accumulate(in_arena(Direction::kOut, kind, heads, r.sum), source, n, action == plan::ReceiveAction::kAssign);
  }
}

void Dispatcher::finish_sums(const plan::SliceView& slice) {
  for (const plan::SumRow& s : slice.sums()) {
    const KvHeads heads = heads_of(s);
    const auto finish = [&](TensorKind kind, TensorKind sum, int64_t offset) {
      cast_rows(local(kind, heads, s.row), heads_.dtype, in_arena(Direction::kOut, sum, heads, offset),
                extent(Direction::kOut, sum, heads, s.num_rows));
    };
    finish(TensorKind::kDk, TensorKind::kDkPartial, s.dk);
    finish(TensorKind::kDv, TensorKind::kDvPartial, s.dv);
  }
}

void Dispatcher::fill_padding(const plan::SliceView& slice) {
  for (const plan::PaddingRow& p : slice.padding()) {
    const auto zero = [&](TensorKind kind) {
      fill_bytes(local(kind).from_row(p.row), extent(Direction::kOut, kind, all_heads(), p.num_rows), 0);
    };
    if (phase_ == Phase::kBackward) {
      zero(TensorKind::kDq);
      zero(TensorKind::kDk);
      zero(TensorKind::kDv);
      continue;
    }
    zero(TensorKind::kOut);
    for (int64_t i = p.row; i < p.row + p.num_rows; ++i)
      for (int64_t head = 0; head < heads_.q_heads; ++head)
        *float_at(local(TensorKind::kLse), i, head) = -std::numeric_limits<float>::infinity();
  }
}

void Dispatcher::fill_nan(const plan::SliceView& slice) {
  const plan::Header& h = slice.header();
  std::memset(arena_, kNanByte, static_cast<size_t>(h.arena_bytes[static_cast<size_t>(phase_)]));
  const auto returned = phase_ == Phase::kForward ? std::array{TensorKind::kOut, TensorKind::kLse, TensorKind::kLse}
                                                  : std::array{TensorKind::kDq, TensorKind::kDk, TensorKind::kDv};
  for (TensorKind kind : returned)
    fill_bytes(local(kind), extent(Direction::kOut, kind, all_heads(), h.num_rows), kNanByte);
}

plan::RowFormat Dispatcher::format(Direction direction, TensorKind kind, const KvHeads& heads) const {
  return plan::row_format(heads_.with_kv_heads(heads.end - heads.begin), phase_, direction, kind);
}

RowView Dispatcher::in_arena(Direction direction, TensorKind kind, const KvHeads& heads, int64_t offset) const {
  const plan::RowFormat f = format(direction, kind, heads);
  return {arena_ + offset, f.row_stride(), f.head_stride};
}

RowExtent Dispatcher::extent(Direction direction, TensorKind kind, const KvHeads& heads, int64_t num_rows) const {
  const plan::RowFormat f = format(direction, kind, heads);
  return {num_rows, f.num_heads, f.head_bytes};
}

RowView Dispatcher::local(TensorKind kind, const KvHeads& heads, int64_t row) const {
  return local(kind).from(row, plan::has_kv_heads(kind) ? heads.begin : heads.begin * heads_.group_heads());
}

}  // namespace distca::runtime
