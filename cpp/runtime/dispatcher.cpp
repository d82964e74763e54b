#include "runtime/dispatcher.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "plan/layout.h"
#include "plan/validate.h"

namespace distca::runtime {

using plan::Direction;
using plan::Phase;
using plan::TensorKind;

Dispatcher::Dispatcher(Protocol& protocol, Backend& backend)
    : protocol_(protocol), backend_(backend), steps_(kNumSlots) {}
Dispatcher::~Dispatcher() = default;

uint64_t Dispatcher::forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                             const Parallel& parallel) {
  Step& s = begin(slice, tensors, scores, Part::kWhole);
  attend_rows(s, parallel);
  collect_rows(s, parallel);
  return s.id.number;
}

uint64_t Dispatcher::backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                              const Parallel& parallel) {
  Step& s = begin(slice, tensors, scores, parallel, Part::kWhole);
  attend_rows(s, parallel);
  collect_rows(s, parallel);
  return s.id.number;
}

void Dispatcher::check_slot() const {
  if (protocol_.has_free_slot()) return;
  std::string names;
  for (const Step& s : steps_) names += (names.empty() ? "" : " and ") + s.id.name();
  throw InvalidArgumentError(message(
      names, " are under way; collect one of them before the next begins: a context has ", kNumSlots, " slots"));
}

uint64_t Dispatcher::dispatch(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
                              std::shared_ptr<void> owner) {
  Step& s = begin(slice, tensors, scores, Part::kDispatch);
  s.owner = std::move(owner);
  return s.id.number;
}

uint64_t Dispatcher::dispatch(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                              const Parallel& parallel, std::shared_ptr<void> owner) {
  Step& s = begin(slice, tensors, scores, parallel, Part::kDispatch);
  s.owner = std::move(owner);
  return s.id.number;
}

bool Dispatcher::is_idle() const {
  return std::all_of(steps_.begin(), steps_.end(), [](const Step& s) { return s.state == Step::State::kFree; });
}

void Dispatcher::set_recording(Recording* recording) {
  recording_ = recording;
  rows_.clear();
  for (Step& s : steps_) {
    s.state = Step::State::kFree;
    s.owner.reset();
  }
}

Dispatcher::Step* Dispatcher::find(uint64_t number) {
  for (Step& s : steps_)
    if (s.state != Step::State::kFree && s.id.number == number) return &s;
  return nullptr;
}

Dispatcher::Step& Dispatcher::step_for(Part part, uint64_t number, std::optional<Phase> phase) {
  Step* const s = find(number);
  const char* const name = part == Part::kAttend ? "attend" : "collect";
  require(s != nullptr, name, ": step ", number, " is not under way; a step is collected once");
  const bool attended = s->state == Step::State::kAttended;
  if (attended != (part == Part::kCollect)) {  // the step's name allocates
    throw InvalidArgumentError(message(name, ": ", s->id.name(),
                                       attended ? " is attended to already; its collect comes next"
                                                : " is dispatched and not attended to; its attend comes next"));
  }
  if (phase && s->phase != *phase)
    throw InvalidArgumentError(message(name, ": ", s->id.name(), " is of the other phase"));
  return *s;
}

namespace {

/// Throws PlanFormatError if the words of the step's plan are no longer those with which it began. A loop may have
/// written the next plan into the same tensor.
void check_plan_kept(const Dispatcher::Step& s) {
  if (plan::check_unaltered(s.slice.words()) != s.checksum)  // the step's name allocates
    throw PlanFormatError(
        message("plan: its tensor was overwritten with another plan before ", s.id.name(), " was collected"));
}

}  // namespace

void Dispatcher::attend(Step& s, const Parallel& parallel) {
  check_plan_kept(s);
  protocol_.resume(s.id, Part::kAttend);
  attend_rows(s, parallel);
}

std::shared_ptr<void> Dispatcher::collect(Step& s, const Parallel& parallel) {
  check_plan_kept(s);
  protocol_.resume(s.id, Part::kCollect);
  collect_rows(s, parallel);
  return std::move(s.owner);
}

Dispatcher::Step& Dispatcher::begin(const plan::SliceView& slice, const ForwardTensors& t, const ScoreOptions& scores,
                                    Part part) {
  Step& s = free_step();
  s.slice = slice;
  s.scores = scores;
  s.phase = Phase::kForward;
  s.set(TensorKind::kQ, t.q);
  s.set(TensorKind::kK, t.k);
  s.set(TensorKind::kV, t.v);
  s.set(TensorKind::kOut, t.out);
  s.set(TensorKind::kLse, t.lse);
  s.retained = t.retained;
  s.returned_max_logits = t.max_logits;
  s.scores.finds_max_logits = t.max_logits != nullptr;
  open(s, part);
  return s;
}

Dispatcher::Step& Dispatcher::begin(const plan::SliceView& slice, const BackwardTensors& t, const ScoreOptions& scores,
                                    const Parallel& parallel, Part part) {
  Step& s = free_step();
  s.slice = slice;
  s.scores = scores;
  s.phase = Phase::kBackward;
  const plan::Header& h = slice.header();
  const int64_t bytes = h.num_rows * h.q_heads * 4;
  if (bytes > s.delta_bytes && !recording_) {
    s.delta_bytes = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
    s.deltas.push_back(backend_.allocate(s.delta_bytes));
  }
  std::byte* const memory = recording_         ? recording_->memory_of_next_step(bytes, backend_).get()
                            : s.deltas.empty() ? nullptr
                                               : s.deltas.back().get();
  const RowView delta = {memory, h.q_heads * 4, 4};
  backend_.row_delta(slice.heads(), h.num_rows, {t.out, t.dout, t.dlse, delta}, parallel);
  s.set(TensorKind::kQ, t.q);
  s.set(TensorKind::kK, t.k);
  s.set(TensorKind::kV, t.v);
  s.set(TensorKind::kLse, t.lse);
  s.set(TensorKind::kDout, t.dout);
  s.set(TensorKind::kDelta, delta);
  s.set(TensorKind::kDq, t.dq);
  s.set(TensorKind::kDk, t.dk);
  s.set(TensorKind::kDv, t.dv);
  s.retained = t.retained;
  open(s, part);
  return s;
}

/// A free record for the next step.
Dispatcher::Step& Dispatcher::free_step() {
  Step& s =
      *std::find_if(steps_.begin(), steps_.end(), [](const Step& one) { return one.state == Step::State::kFree; });
  s.tensors = {};
  protocol_.begin_work();
  return s;
}

/// Begins the step, lets peers send, and sends this home's rows.
void Dispatcher::open(Step& s, Part part) {
  const Protocol::Timer timer(protocol_, "dispatch");
  s.heads = s.slice.heads();
  s.num_rounds = s.slice.header().num_rounds;
  s.checksum = s.slice.header().checksum;
  for (const plan::SendRow& row : s.slice.sends(s.phase))
    if (row.direction == static_cast<int64_t>(Direction::kOut)) s.num_rounds = std::max(s.num_rounds, row.round + 1);
  if (recording_) s.num_rounds = recording_->rounds_of_next_step(s.num_rounds);
  s.id = protocol_.begin(s.phase, s.slice.header(), s.scores, part);
  s.state = Step::State::kDispatched;
  s.arena = protocol_.arena();
  s.max_logits = {};
  if (const int64_t n = protocol_.num_ranks(); s.scores.finds_max_logits)
    s.max_logits = {s.arena, protocol_.arena_bytes() - MaxLogits::bytes(n), n, s.heads.q_heads};
  if (hooks_.begun) hooks_.begun(s);
  protocol_.grant(s.slice.waits(s.phase));
  dispatch_rows(s);
}

/// Puts rows of this home into their servers' arenas, round by round. Rows that this server assembles from its own
/// tensor are copied.
void Dispatcher::dispatch_rows(const Step& step) {
  const plan::SendRow* last = nullptr;  // of the message that is being put
  const auto close = [&] {
    if (last != nullptr) protocol_.announce(Direction::kIn, last->peer, last->round);
    last = nullptr;
  };
  for (const plan::SendRow& s : step.slice.sends(step.phase)) {
    if (s.direction != static_cast<int64_t>(Direction::kIn)) break;
    const auto kind = static_cast<TensorKind>(s.tensor);
    const KvHeads heads = heads_of(s);
    const RowView source = step.local(kind, heads, s.row);
    const RowExtent n = step.extent(Direction::kIn, kind, heads, s.num_rows);
    if (s.peer == protocol_.rank()) {
      rows_.push_back({.to = step.in_arena(Direction::kIn, kind, heads, s.target), .from = source, .n = n});
      continue;
    }
    if (last == nullptr || s.peer != last->peer || s.round != last->round) {
      close();
      protocol_.await_credit(Direction::kIn, s.peer, 0);  // one for all rounds
    }
    last = &s;
    const plan::RowFormat f = step.format(Direction::kIn, kind, heads);
    protocol_.put(s.peer, s.target, f.row_stride(), f.head_stride, source, n);
  }
  close();
  run_rows();
  protocol_.flush(/*more=*/true);
  protocol_.end_dispatch();
}

/// Computes the groups that wait for the rows of some rounds; those that need no row of another rank are of round -1.
void Dispatcher::attend_groups(const Step& step, Rounds rounds, const Parallel& parallel) {
  attention::Problem problem = server_tasks_.problem(step.slice, step, step.scores, rounds);
  if (problem.groups.empty() && !recording_) return;
  problem.rows_travel = rows_travel();
  if (step.phase == Phase::kBackward)
    backend_.backward(problem, parallel);
  else
    backend_.forward(problem, parallel);
}

/// Computes all that this server has of the step. Groups that need no row of another rank come first, while such rows
/// arrive; then the groups of each round of rows, whose results go home while the next round is computed. All rounds
/// are taken as one over a collective transport, where nothing moves until all ranks exchange, and in a recording,
/// whose operations must suit plans of any number of rounds.
void Dispatcher::attend_rows(Step& step, const Parallel& parallel) {
  const Protocol::Timer timer(protocol_, "attend");
  if (step.max_logits.is_asked())
    backend_.fill(step.max_logits.found(), step.max_logits.extent_of_found(), Fill::kMinusInfinity);
  attend_groups(step, {-1, 0}, parallel);
  find_last_home(step);
  const auto groups = step.slice.groups();
  const int64_t each = recording_ || protocol_.is_collective() ? plan::kMaxRoundsIn : 1;
  const int64_t end = recording_ ? each : groups.empty() ? 0 : groups.back().round + 1;
  for (int64_t round = 0; round < end; round += each) {
    const Rounds rounds = {round, round + each};
    protocol_.await_rows(step.slice.waits(step.phase), Direction::kIn, rounds);
    attend_groups(step, rounds, parallel);
    send_home(step, 0, rounds);
    if (rounds.end < end) protocol_.flush(/*more=*/true);
  }
  if (step.phase == Phase::kForward && step.retained != nullptr) retain_keys(step);
  step.more = protocol_.flush(step.num_rounds > 1);
  step.state = Step::State::kAttended;
}

/// Whether this rank exchanges rows in a step that is under way. A recording may be replayed with a plan that does.
bool Dispatcher::rows_travel() const {
  if (recording_) return protocol_.num_ranks() > 1;
  return std::any_of(steps_.begin(), steps_.end(), [&](const Step& step) {
    if (step.state == Step::State::kFree) return false;
    const auto leaves = [&](const plan::SendRow& s) { return s.peer != protocol_.rank(); };
    const auto sends = step.slice.sends(step.phase);
    return !step.slice.waits(step.phase).empty() || std::any_of(sends.begin(), sends.end(), leaves);
  });
}

/// Keeps the keys that will not be sent to this server again for backward. At this point results are on their way, and
/// nothing has written over the keys.
void Dispatcher::retain_keys(const Step& step) {
  for (const plan::GroupRow& g : step.slice.groups()) {
    if (g.retained_k < 0) continue;
    const KvHeads heads = heads_of(g);
    const auto keep = [&](TensorKind kind, int64_t to, int64_t from) {
      rows_.push_back({.to = step.in_retained(kind, heads, to),
                       .from = step.in_arena(Direction::kIn, kind, heads, from),
                       .n = step.extent(Direction::kIn, kind, heads, g.num_arena_rows)});
    };
    keep(TensorKind::kK, g.retained_k, g.forward_k);
    keep(TensorKind::kV, g.retained_v, g.forward_v);
  }
  run_rows();
}

/// Takes in the results, round by round. A home grants round j + 1 after it took in round j, and every rank sends its
/// round-j rows before it waits for those of its own round j. By induction over j no rank waits for ever. Over a
/// collective transport all ranks go on as long as one of them has a round left.
void Dispatcher::collect_rows(Step& step, const Parallel& parallel) {
  const Protocol::Timer timer(protocol_, "collect");
  receive_home(step, 0);
  for (int64_t round = 1; step.more; ++round) {
    protocol_.grant_round(step.slice.waits(step.phase), round);
    send_home(step, round, {0, plan::kMaxRoundsIn});
    step.more = protocol_.flush(round + 1 < step.num_rounds);
    receive_home(step, round);
  }
  fill_padding(step);
  if (step.max_logits.is_asked()) find_max_logits(step);
  if (step.phase == Phase::kForward && step.scores.sinks != nullptr)
    backend_.add_sinks(step.heads, step.slice.header().num_rows, step.local(TensorKind::kOut),
                       step.local(TensorKind::kLse), step.scores.sinks, parallel);
  if (protocol_.is_queued())
    poison(step);
  else
    backend_.finish();
  protocol_.settle();
  if (hooks_.ends) hooks_.ends(step);
  protocol_.end();
  step.state = Step::State::kFree;
}

/// Finds after which round of rows the last results go home to each peer in the first round of results.
void Dispatcher::find_last_home(const Step& step) {
  last_home_.assign(static_cast<size_t>(protocol_.num_ranks()), 0);
  for (const plan::SendRow& s : step.slice.sends(step.phase))
    if (s.direction == static_cast<int64_t>(Direction::kOut) && s.round == 0)
      last_home_[static_cast<size_t>(s.peer)] = s.after;
}

/// Puts those results of a round home that are computed from rows of the rounds `after`. Where they are the last ones,
/// the peer is told that it has all of the round. What goes to a peer is one message, because messages that are sent
/// together arrive in any order.
void Dispatcher::send_home(const Step& step, int64_t round, Rounds after) {
  homeward_.clear();
  for (const plan::SendRow& s : step.slice.sends(step.phase))
    if (s.direction == static_cast<int64_t>(Direction::kOut) && s.round == round && s.after >= after.begin &&
        s.after < after.end)
      homeward_.push_back(&s);
  // A stable sort would allocate.
  const auto place = [&](const plan::SendRow* s) {
    return std::pair(s->peer + (s->peer < protocol_.rank() ? protocol_.num_ranks() : 0), s);
  };
  std::ranges::sort(homeward_, std::less(), place);
  for (auto begin = homeward_.begin(); begin != homeward_.end();) {
    const int64_t peer = (*begin)->peer;
    protocol_.await_credit(Direction::kOut, peer, round);
    for (; begin != homeward_.end() && (*begin)->peer == peer; ++begin) {
      const plan::SendRow& s = **begin;
      const auto kind = static_cast<TensorKind>(s.tensor);
      const KvHeads heads = heads_of(s);
      const plan::RowFormat f = step.format(Direction::kOut, kind, heads);
      protocol_.put(peer, s.target, f.row_stride(), f.head_stride, step.in_arena(Direction::kIn, kind, heads, s.source),
                    step.extent(Direction::kOut, kind, heads, s.num_rows));
    }
    if (round > 0 || last_home_[static_cast<size_t>(peer)] < after.end) {
      if (round == 0 && step.max_logits.is_asked()) put_max_logits(step, peer);
      protocol_.announce(Direction::kOut, peer, round);
    }
  }
}

/// Puts the largest scores of a home's rows into its slot. All results of forward are of round 0. Therefore all tasks
/// of the home are computed when the last message of that round goes to it.
void Dispatcher::put_max_logits(const Step& step, int64_t home) {
  const MaxLogits& m = step.max_logits;
  const RowView found = m.row(m.found_for(home));
  protocol_.put(home, m.target_of(protocol_.rank()), found.row_stride, found.head_stride, found, m.extent_of_row());
}

/// Takes the largest of what this rank and its servers have found in its rows.
void Dispatcher::find_max_logits(const Step& step) {
  max_logits_.assign(1, step.max_logits.found_for(protocol_.rank()));
  for (const plan::WaitRow& w : step.slice.waits(step.phase))
    if (w.direction == static_cast<int64_t>(Direction::kOut)) max_logits_.push_back(step.max_logits.told_by(w.peer));
  backend_.largest(max_logits_, step.max_logits.q_heads(), step.returned_max_logits);
}

void Dispatcher::receive_home(const Step& step, int64_t round) {
  protocol_.await_rows(step.slice.waits(step.phase), Direction::kOut, {round, round + 1});
  for (const plan::ReceiveRow& r : step.slice.receives(step.phase)) {
    if (r.round != round || r.action != static_cast<int64_t>(plan::ReceiveAction::kCopy)) continue;
    const auto kind = static_cast<TensorKind>(r.tensor);
    const KvHeads heads = heads_of(r);
    const RowView source = step.in_arena(Direction::kOut, kind, heads, r.source);
    const RowExtent n = step.extent(Direction::kOut, kind, heads, r.num_rows);
    rows_.push_back({.to = step.local(kind, heads, r.row), .from = source, .n = n});
  }
  run_rows();
  if (step.phase == Phase::kForward) return;
  reduce_table_.fill(step.slice, round, step.arena, step.local(TensorKind::kDk), step.local(TensorKind::kDv));
  if (!reduce_table_.entries.empty() || recording_) backend_.reduce(reduce_table_, step.heads.dtype);
}

void Dispatcher::fill_padding(const Step& step) {
  int64_t next_row = 0;
  for (const plan::SegmentRow& s : step.slice.segments()) {
    const int64_t row = std::exchange(next_row, next_row + s.num_rows());
    if (s.document != plan::kPadding) continue;
    const auto fill = [&](TensorKind kind, Fill value) {
      rows_.push_back({.kind = RowWork::Kind::kFill,
                       .to = step.local(kind).from_row(row),
                       .n = step.extent(Direction::kOut, kind, step.all_heads(), s.num_rows()),
                       .fill = value});
    };
    if (step.phase == Phase::kBackward) {
      for (const TensorKind kind : {TensorKind::kDq, TensorKind::kDk, TensorKind::kDv}) fill(kind, Fill::kZero);
      continue;
    }
    fill(TensorKind::kOut, Fill::kZero);
    fill(TensorKind::kLse, Fill::kMinusInfinity);
  }
  run_rows();
}

/// Does the collected row work as one operation. A recording gets the operation even if there is nothing to do, because
/// another plan may have something.
void Dispatcher::run_rows() {
  if (!rows_.empty() || recording_) backend_.run(rows_);
  rows_.clear();
}

void Dispatcher::poison(const Step& step) {
  const int64_t num_rows = step.slice.header().num_rows;
  for (TensorKind kind : step.returned())
    protocol_.poison(step.local(kind), step.extent(Direction::kOut, kind, step.all_heads(), num_rows));
  if (step.max_logits.is_asked())
    protocol_.poison(step.max_logits.row(step.returned_max_logits), step.max_logits.extent_of_row());
}

}  // namespace distca::runtime
