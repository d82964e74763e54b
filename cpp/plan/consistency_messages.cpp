// Whether messages fit to tasks, every returned row comes from one place, and ranks wait for those that send.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/consistency_checker.h"
#include "plan/validate.h"

namespace distca::plan::consistency {

void Checker::check_messages() {
  const std::vector<Message> out = received(Phase::kForward, TensorKind::kOut);
  const auto check_same = [&](const std::vector<Message>& other, const char* what) {
    check_plan(other == out, what, " are not those whose outputs come home");
  };
  check_same(received(Phase::kForward, TensorKind::kLse), "log-sum-exp rows that come home");
  check_same(received(Phase::kBackward, TensorKind::kDq), "query gradients that come home");
  const std::vector<Message> queries = sent(Phase::kForward, TensorKind::kQ);
  check_same(without_rounds(queries), "queries that are sent");
  for (TensorKind kind : {TensorKind::kQ, TensorKind::kDout, TensorKind::kLse, TensorKind::kDelta})
    check_plan(sent(Phase::kBackward, kind) == queries,
               "rows that are sent for backward are not those whose outputs come home");
  const std::vector<Message> keys = sent(Phase::kForward, TensorKind::kK);
  const std::vector<Message> keys_again = sent(Phase::kBackward, TensorKind::kK);
  check_plan(sent(Phase::kForward, TensorKind::kV) == keys && sent(Phase::kBackward, TensorKind::kV) == keys_again,
             "keys are not sent with their values");
  check_plan(h_.retains != 0 ? std::includes(keys.begin(), keys.end(), keys_again.begin(), keys_again.end())
                             : keys == keys_again,
             "keys that are sent for backward are not those of forward");
}

std::vector<Message> Checker::received(Phase p, TensorKind kind) const {
  std::vector<Message> messages;
  for (const ReceiveRow& r : slice_.receives(p))
    if (r.tensor == static_cast<int64_t>(kind)) messages.push_back({r.peer, part_of(r)});
  std::sort(messages.begin(), messages.end());
  return messages;
}

std::vector<Message> Checker::sent(Phase p, TensorKind kind) const {
  std::vector<Message> messages;
  for (const SendRow& s : slice_.sends(p)) {
    if (s.direction != static_cast<int64_t>(Direction::kIn) || s.tensor != static_cast<int64_t>(kind)) continue;
    check_plan(s.source == -1, "rows of this rank are sent from the arena");
    check_plan(segment_of(s.row, s.num_rows) != nullptr, "rows [", s.row, ", ", s.row + s.num_rows,
               ") are sent, which are not of one segment");
    if (s.peer != h_.rank) messages.push_back({s.peer, part_of(s), s.round});
  }
  std::sort(messages.begin(), messages.end());
  return messages;
}

std::vector<Message> Checker::without_rounds(std::vector<Message> messages) {
  for (Message& m : messages) m.round = 0;
  std::sort(messages.begin(), messages.end());
  return messages;
}

void Checker::check_sums() {
  for (const ReceiveRow& r : slice_.receives(Phase::kForward))
    check_plan(r.sum == -1, "rows of a forward step have a sum");
  std::vector<const ReceiveRow*> terms;
  int64_t last_round = 0;
  for (const ReceiveRow& r : slice_.receives(Phase::kBackward)) {
    last_round = std::max(last_round, r.round);
    if (r.action != static_cast<int64_t>(ReceiveAction::kCopy))
      terms.push_back(&r);
    else
      check_plan(r.sum == -1, "rows that are only copied have a sum");
  }
  check_plan(h_.num_rounds == last_round + 1, "it says ", h_.num_rounds, " rounds and uses ", last_round + 1);
  std::sort(terms.begin(), terms.end(), [](const ReceiveRow* x, const ReceiveRow* y) {
    return std::tuple(x->sum, x->round, x) < std::tuple(y->sum, y->round, y);
  });
  for (size_t i = 0; i < terms.size();) {
    const ReceiveRow& first = *terms[i];
    const size_t begin = i;
    for (; i < terms.size() && terms[i]->sum == first.sum; ++i) {
      const bool assigns = terms[i]->action == static_cast<int64_t>(ReceiveAction::kAssign);
      check_plan(part_of(*terms[i]) == part_of(first) && (i == begin || !assigns),
                 "terms of one sum are not of the same rows, or start it twice");
      check_plan(terms[i]->tensor == first.tensor, "terms of one sum are of two dtypes");
    }
    const auto kind = static_cast<int64_t>(kind_of_sum(static_cast<TensorKind>(first.tensor)));
    sums_.push_back({static_cast<int64_t>(Phase::kBackward), kind, first.sum, part_of(first), 0});
    const bool starts = first.action == static_cast<int64_t>(ReceiveAction::kAssign);
    check_plan(starts != take_own_term(static_cast<TensorKind>(kind), first.sum, first),
               "a sum of key gradients has no first term, or two");
    for (size_t t = begin; t < i; ++t)
      check_plan(terms[t]->action != static_cast<int64_t>(ReceiveAction::kFinish) || i - begin == 1,
                 "a sum is done without its terms");
  }
  check_plan(own_terms_.empty(), "key gradients are computed that are neither returned nor sent nor added");
}

bool Checker::take_own_term(TensorKind kind, int64_t offset, const ReceiveRow& sum) {
  const auto own = own_terms_.find({static_cast<int64_t>(kind), offset});
  if (own == own_terms_.end()) return false;
  const OwnTerm& term = own->second;
  const Part& part = term.move.part;
  check_plan(part.num_rows == sum.num_rows && part.kv_head_begin == sum.kv_head_begin &&
                 part.kv_head_end == sum.kv_head_end && is_at(sum.row, sum.num_rows, term.document, term.begin),
             "this rank's own term of a sum is of other rows");
  own_terms_.erase(own);
  return true;
}

void Checker::check_returned(TensorKind kind) {
  parts_.clear();
  int64_t row = 0;
  for (const SegmentRow& s : slice_.segments()) {
    if (s.document == kPadding) parts_.push_back({row, s.num_rows(), 0, h_.kv_heads});
    row += s.num_rows();
  }
  if (kind == TensorKind::kDk || kind == TensorKind::kDv) {
    for (const GroupRow& g : slice_.groups())
      for (int64_t i = g.grad_begin; i < g.grad_end; ++i)
        if (const GradRow& r = slice_.grads()[static_cast<size_t>(i)];
            r.target == static_cast<int64_t>(GradTarget::kReturned))
          parts_.push_back({r.row, r.end - r.begin, g.kv_head_begin, g.kv_head_end});
    for (const Move& s : sums_)
      if (s.tensor == static_cast<int64_t>(kind_of_sum(kind))) parts_.push_back(s.part);
  } else {
    for (const TaskRow& t : slice_.tasks()) {
      const GroupRow& g = slice_.groups()[static_cast<size_t>(t.group)];
      if (t.home == h_.rank) parts_.push_back({t.home_row, t.q_end - t.q_begin, g.kv_head_begin, g.kv_head_end});
    }
  }
  const Phase p = kind == TensorKind::kOut || kind == TensorKind::kLse ? Phase::kForward : Phase::kBackward;
  for (const ReceiveRow& r : slice_.receives(p))
    if (r.tensor == static_cast<int64_t>(kind) && r.action == static_cast<int64_t>(ReceiveAction::kCopy))
      parts_.push_back(part_of(r));
  check_tiles(kind);
}

void Checker::check_tiles(TensorKind kind) {
  std::sort(parts_.begin(), parts_.end());
  heads_.clear();
  for (const Part& p : parts_) heads_.insert(heads_.end(), {p.kv_head_begin, p.kv_head_end});
  heads_.insert(heads_.end(), {0, h_.kv_heads});
  std::sort(heads_.begin(), heads_.end());
  heads_.erase(std::unique(heads_.begin(), heads_.end()), heads_.end());
  for (size_t i = 0; i + 1 < heads_.size(); ++i) {
    int64_t next = 0;
    for (const Part& p : parts_) {
      if (p.kv_head_begin > heads_[i] || p.kv_head_end <= heads_[i]) continue;
      check_plan(p.row == next, "returned tensor ", static_cast<int64_t>(kind), ", key/value head ", heads_[i],
                 ": row ", std::min(p.row, next), p.row < next ? " comes from two places" : " comes from nowhere");
      next = p.row + p.num_rows;
    }
    check_plan(next == h_.num_rows, "returned tensor ", static_cast<int64_t>(kind), ", key/value head ", heads_[i],
               ": row ", next, " comes from nowhere");
  }
}

void Checker::check_waits(Phase p) const {
  std::vector<std::pair<int64_t, int64_t>> home, awaited_home;  // (round, peer)
  std::vector<std::pair<int64_t, int64_t>> in;
  const WaitRow* last = nullptr;
  for (const WaitRow& w : slice_.waits(p)) {
    check_plan(
        last == nullptr || std::tie(last->direction, last->round, last->peer) < std::tie(w.direction, w.round, w.peer),
        "wait for rank ", w.peer, ": out of order");
    last = &w;
    if (w.direction == static_cast<int64_t>(Direction::kIn))
      in.emplace_back(w.round, w.peer);
    else
      awaited_home.emplace_back(w.round, w.peer);
  }
  for (const ReceiveRow& r : slice_.receives(p)) {
    if (r.peer != h_.rank) {
      home.emplace_back(r.round, r.peer);
      continue;
    }
    check_plan(r.action == static_cast<int64_t>(ReceiveAction::kFinish), "rows come home from their own rank");
  }
  std::sort(home.begin(), home.end());
  home.erase(std::unique(home.begin(), home.end()), home.end());
  check_plan(home == awaited_home, "it does not wait for exactly the ranks from which rows come home");
  for (const TaskRow& t : slice_.tasks()) {
    const std::pair needed = {slice_.groups()[static_cast<size_t>(t.group)].round, t.home};
    check_plan(t.home == h_.rank || std::binary_search(in.begin(), in.end(), needed), "it does not wait for rank ",
               t.home, " in round ", needed.first, ", whose rows it computes");
  }
  const int64_t rounds = slice_.groups().empty() ? 0 : slice_.groups().back().round + 1;
  check_plan(in.empty() || in.back().first < rounds, "it waits for rows in a round in which it computes nothing");
  for (int64_t round = 0; round < kMaxRoundsIn; ++round) {
    const bool waits = std::any_of(in.begin(), in.end(), [&](const auto& w) { return w.first == round; });
    check_plan(waits || !needs_others_[static_cast<size_t>(p)][static_cast<size_t>(round)],
               "it does not wait for keys of others in round ", round);
  }
}

}  // namespace distca::plan::consistency
