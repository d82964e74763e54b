#include "plan/consistency.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/consistency_checker.h"
#include "plan/validate.h"

namespace distca::plan::consistency {

void Checker::run() {
  find_rows();
  check_groups();
  check_blocks();
  check_tasks();
  check_gradients();
  for (Phase p : kPhases) {
    check_copies(p);
    check_results(p);
    check_waits(p);
  }
  check_messages();
  check_sums();
  check_returned(TensorKind::kOut);
  check_returned(TensorKind::kLse);
  for (TensorKind kind : {TensorKind::kDq, TensorKind::kDk, TensorKind::kDv}) check_returned(kind);
  for (Phase p : kPhases) {
    check_arena(p);
    check_targets(p);
  }
  check_retained();
}

void Checker::find_rows() {
  int64_t row = 0;
  for (const SegmentRow& s : slice_.segments()) {
    if (s.document != kPadding) {
      held_.push_back({s.document, s.begin, s.end, row});
      Held* const last = by_row_.empty() ? nullptr : &by_row_.back();
      const bool goes_on = last != nullptr && last->document == s.document && last->end == s.begin &&
                           last->row + (last->end - last->begin) == row;
      if (goes_on)
        last->end = s.end;
      else
        by_row_.push_back(held_.back());
    }
    row += s.num_rows();
  }
  check_plan(row == h_.num_rows, "its segments have ", row, " rows of ", h_.num_rows);
  std::sort(held_.begin(), held_.end());
}

std::span<const Held> Checker::held(int64_t document) const {
  const auto less = [](const Held& x, const Held& y) { return x.document < y.document; };
  const auto [first, last] = std::equal_range(held_.begin(), held_.end(), Held{document, 0, 0, 0}, less);
  return {first, last};
}

std::vector<Held> Checker::held_keys(int64_t document) const {
  std::vector<Held> keys;
  for (const SharedRows& s : slice_.shared(document))
    for_each_held(s.of, s.begin, s.end, [&](int64_t begin, int64_t end, int64_t row) {
      keys.push_back({s.of, begin + s.shift(), end + s.shift(), row});
    });
  const std::span<const Held> own = held(document);
  keys.insert(keys.end(), own.begin(), own.end());
  return keys;
}

void Checker::check_groups() const {
  int64_t next_task = 0, next_block = 0, next_grad = 0, index = 0, local_tasks = 0, round = -1;
  for (const GroupRow& g : slice_.groups()) {
    check_plan(
        g.task_begin == next_task && g.task_end > next_task && g.block_begin == next_block && g.grad_begin == next_grad,
        "group ", index, ": its tasks, blocks or gradients do not follow those of the group before");
    next_task = g.task_end;
    next_block += g.num_blocks;
    next_grad = g.grad_end;
    check_plan((g.round < 0) == (index < h_.num_local_groups) && (g.round == round || g.round == round + 1), "group ",
               index, ": round ", g.round, " after round ", round);
    round = g.round;
    if (round < 0) local_tasks = g.task_end;
    int64_t kv_begin = INT64_MAX, kv_end = 0;
    for (const TaskRow& t :
         slice_.tasks().subspan(static_cast<size_t>(g.task_begin), static_cast<size_t>(g.task_end - g.task_begin))) {
      kv_begin = std::min(kv_begin, t.kv_begin);
      kv_end = std::max(kv_end, t.kv_end);
    }
    check_plan(kv_begin == g.kv_begin && kv_end == g.kv_end, "group ", index, ": its tasks see keys [", kv_begin, ", ",
               kv_end, "), it has [", g.kv_begin, ", ", g.kv_end, ")");
    if (g.num_arena_rows == 0)
      check_plan(g.forward_k == -1 && g.forward_v == -1 && g.backward_k == -1 && g.backward_v == -1, "group ", index,
                 ": arena offsets of keys that do not travel");
    ++index;
  }
  check_plan(next_task == std::ssize(slice_.tasks()) && next_block == std::ssize(slice_.blocks()) &&
                 next_grad == std::ssize(slice_.grads()),
             "tasks, blocks or gradients belong to no group");
  check_plan(local_tasks == h_.num_local_tasks, "it says ", h_.num_local_tasks, " local tasks of ", local_tasks);
}

void Checker::check_blocks() {
  const int64_t size = h_.key_block_rows;
  std::map<int64_t, Pool> pools;  // by the offset of k in forward
  int64_t index = 0;
  for (const GroupRow& g : slice_.groups()) {
    const std::vector<Held> here = held_keys(g.document);
    int64_t rows_of_others = 0;
    size_t next = 0;  // first segment that ends after the block's first key
    Pool none, &pool = g.num_arena_rows == 0 ? none : pools[g.forward_k];
    if (pool.first == nullptr) pool.first = &g;
    check_plan(is_same_pool(*pool.first, g), "group ", index, ": its keys lie where those of other heads do");
    for (int64_t b = 0; b < g.num_blocks; ++b) {
      const int64_t start = (g.first_block + b) * size;
      const int64_t begin = std::max(start, g.kv_begin), end = std::min(start + size, g.kv_end);
      while (next < here.size() && here[next].end <= begin) ++next;
      const bool local = next < here.size() && here[next].begin <= begin && here[next].end >= end;
      const int64_t entry = slice_.blocks()[static_cast<size_t>(g.block_begin + b)];
      check_plan(local ? entry == block_entry(here[next].row + (start - here[next].begin), false) : (entry & 1) != 0,
                 "group ", index, " (document ", g.document, "): key block ", b, " is not where its rows are");
      if (local) continue;
      int64_t key = begin;
      slice_.for_each_owner(g.document, begin, end, [&](int64_t document, int64_t row, int64_t num_rows) {
        const int64_t arena_row = (entry >> 1) + (key - start);
        add_rows(pool, arena_row, {arena_row + num_rows, document, arena_row - row}, [&](int64_t first, int64_t last) {
          rows_of_others += last - first;
          const int64_t shift = arena_row - row;
          for_each_held(document, first - shift, last - shift, [&](int64_t from, int64_t to, int64_t at) {
            rows_of_others -= to - from;
            expect_copy(g, at, to - from, from + shift);
          });
        });
        key += num_rows;
      });
    }
    if (rows_of_others > 0) {
      check_plan(g.round >= 0, "group ", index, ": it needs rows of others and waits for none");
      const auto round = static_cast<size_t>(g.round);
      needs_others_[0][round] = true;
      needs_others_[1][round] = needs_others_[1][round] || g.retained_k < 0;
    }
    ++index;
  }
  for (const auto& [offset, pool] : pools) {
    int64_t end = 0;
    for (const auto& [row, rows] : pool.rows) {
      check_plan(row == end, "rows of keys in the arena that no group has: ", end, " to ", row);
      end = rows.end;
    }
    check_plan(end == pool.first->num_arena_rows, "groups have ", end, " rows of keys in the arena and say ",
               pool.first->num_arena_rows);
  }
}

bool Checker::is_same_pool(const GroupRow& x, const GroupRow& y) {
  const auto place = [](const GroupRow& g) {
    return std::tuple(g.kv_head_begin, g.kv_head_end, g.num_arena_rows, g.forward_v, g.backward_k, g.backward_v);
  };
  return &x == &y || (place(x) == place(y) && x.retained_k < 0 && y.retained_k < 0);
}

void Checker::expect_copy(const GroupRow& g, int64_t row, int64_t num_rows, int64_t arena_row) {
  const Part part = {row, num_rows, g.kv_head_begin, g.kv_head_end};
  for (Phase p : kPhases) {
    if (p == Phase::kBackward && g.retained_k >= 0) continue;
    for (TensorKind kind : {TensorKind::kK, TensorKind::kV}) {
      const bool is_k = kind == TensorKind::kK;
      const int64_t base =
          p == Phase::kForward ? (is_k ? g.forward_k : g.forward_v) : (is_k ? g.backward_k : g.backward_v);
      const int64_t at = base + arena_row * stride(p, Direction::kIn, kind, part);
      copies_.push_back({static_cast<int64_t>(p), static_cast<int64_t>(kind), at, part, h_.rank});
    }
  }
}

void Checker::merge(std::vector<Move>& moves) const {
  std::sort(moves.begin(), moves.end());
  size_t n = 0;
  for (const Move& m : moves) {
    if (n > 0) {
      Move& last = moves[n - 1];
      const int64_t step =
          stride(static_cast<Phase>(m.phase), Direction::kIn, static_cast<TensorKind>(m.tensor), m.part);
      if (last.phase == m.phase && last.tensor == m.tensor && last.part.kv_head_begin == m.part.kv_head_begin &&
          last.part.kv_head_end == m.part.kv_head_end && last.part.row + last.part.num_rows == m.part.row &&
          last.offset + last.part.num_rows * step == m.offset) {
        last.part.num_rows += m.part.num_rows;
        continue;
      }
    }
    moves[n++] = m;
  }
  moves.resize(n);
}

void Checker::check_copies(Phase p) {
  std::vector<Move> expected, made;
  for (const Move& m : copies_)
    if (m.phase == static_cast<int64_t>(p)) expected.push_back(m);
  for (const SendRow& s : slice_.sends(p))
    if (s.peer == h_.rank) made.push_back({static_cast<int64_t>(p), s.tensor, s.target, part_of(s), s.peer});
  merge(expected);
  merge(made);
  check_plan(expected == made, "this rank's own keys are not all copied to where its tasks read them, each once");
}

void Checker::check_tasks() const {
  int64_t index = 0;
  for (const TaskRow& t : slice_.tasks()) {
    const GroupRow& g = slice_.groups()[static_cast<size_t>(t.group)];
    if (t.home == h_.rank) {
      check_plan(holds(t.home_row, t.q_end - t.q_begin, g.document, t.q_begin), "task ", index, ": rows [", t.q_begin,
                 ", ", t.q_end, ") of document ", g.document, " are not at row ", t.home_row);
      check_plan(t.forward_q == -1 && t.forward_lse == -1 && t.backward_q == -1 && t.backward_dout == -1 &&
                     t.backward_lse == -1 && t.backward_delta == -1,
                 "task ", index, ": its rows are here, and have a place in the arena");
    }
    ++index;
  }
}

void Checker::check_gradients() const {
  for (const GroupRow& g : slice_.groups()) {
    for (int64_t i = g.grad_begin; i < g.grad_end; ++i) {
      const GradRow& r = slice_.grads()[static_cast<size_t>(i)];
      const bool returned = r.target == static_cast<int64_t>(GradTarget::kReturned);
      check_plan(
          returned ? holds(r.row, r.end - r.begin, g.document, r.begin) && r.dk == -1 && r.dv == -1 : r.row == -1,
          "gradients of rows [", r.begin, ", ", r.end, ") of document ", g.document, ": row ", r.row);
    }
  }
}

void Checker::check_results(Phase p) {
  std::vector<Move> results, sent;
  const auto phase = static_cast<int64_t>(p);
  for (const TaskRow& t : slice_.tasks()) {
    if (t.home == h_.rank) continue;
    const GroupRow& g = slice_.groups()[static_cast<size_t>(t.group)];
    const Part part = heads_of(g, t.q_end - t.q_begin);
    const auto add = [&](TensorKind kind, int64_t offset) {
      results.push_back({phase, static_cast<int64_t>(kind), offset, part, t.home, g.round});
    };
    if (p == Phase::kForward) {
      add(TensorKind::kOut, t.forward_q);
      add(TensorKind::kLse, t.forward_lse);
    } else {
      add(TensorKind::kDq, t.backward_dout);
    }
  }
  for (const SendRow& s : slice_.sends(p)) {
    if (s.direction != static_cast<int64_t>(Direction::kOut)) continue;
    check_plan(s.row == -1, "results are sent from row ", s.row, " of this rank");
    sent.push_back({phase, s.tensor, s.source, {0, s.num_rows, s.kv_head_begin, s.kv_head_end}, s.peer, s.after});
  }
  if (p == Phase::kBackward) add_gradients(results, sent);
  std::sort(results.begin(), results.end());
  std::sort(sent.begin(), sent.end());
  check_plan(results == sent, p == Phase::kForward ? "outputs" : "gradients",
             " that this rank computes for others are not all sent home, each once");
}

void Checker::add_gradients(std::vector<Move>& results, const std::vector<Move>& sent) {
  std::vector<Move> by_offset = sent;
  std::sort(by_offset.begin(), by_offset.end());
  std::map<std::pair<int64_t, int64_t>, OwnTerm> written;  // by tensor and offset
  for (const GroupRow& g : slice_.groups()) {
    for (int64_t i = g.grad_begin; i < g.grad_end; ++i) {
      const GradRow& r = slice_.grads()[static_cast<size_t>(i)];
      if (r.target == static_cast<int64_t>(GradTarget::kReturned)) continue;
      const bool narrow = r.target == static_cast<int64_t>(GradTarget::kArena);
      for (const auto& [kind, offset] : {std::pair{narrow ? TensorKind::kDk : TensorKind::kDkPartial, r.dk},
                                         {narrow ? TensorKind::kDv : TensorKind::kDvPartial, r.dv}}) {
        const auto tensor = static_cast<int64_t>(kind);
        const Move m = {static_cast<int64_t>(Phase::kBackward), tensor, offset,
                        heads_of(g, r.end - r.begin),           0,      g.round};
        const auto [document, begin] = owner_of(g.document, r.begin, r.end);
        check_plan(document >= 0, "gradients of rows [", r.begin, ", ", r.end, ") are of several documents");
        if (r.target != static_cast<int64_t>(GradTarget::kAdded)) {
          const bool is_new = written.try_emplace({tensor, offset}, OwnTerm{m, document, begin}).second;
          check_plan(is_new, "gradients of rows [", r.begin, ", ", r.end, ") are written where others lie");
          continue;
        }
        const auto after = written.upper_bound({tensor, offset});
        OwnTerm* const place = after == written.begin() ? nullptr : &std::prev(after)->second;
        check_plan(place != nullptr &&
                       place->adds(m, document, begin, stride(Phase::kBackward, Direction::kOut, kind, m.part)),
                   "gradients of rows [", r.begin, ", ", r.end, ") are added to those of other rows");
        place->move.after = g.round;  // groups come by round
      }
    }
  }
  for (const auto& [place, term] : written) {
    Move m = term.move;
    const auto at = std::lower_bound(by_offset.begin(), by_offset.end(), Move{m.phase, m.tensor, m.offset, {}, 0});
    if (at == by_offset.end() || at->tensor != m.tensor || at->offset != m.offset) {
      own_terms_.emplace(place, term);
      continue;
    }
    m.peer = at->peer;
    results.push_back(m);
  }
}

}  // namespace distca::plan::consistency

namespace distca::plan {

void check_consistency(const SliceView& slice) { consistency::Checker(slice).run(); }

}  // namespace distca::plan
