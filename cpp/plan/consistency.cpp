#include "plan/consistency.h"

#include <algorithm>
#include <compare>
#include <tuple>
#include <utility>
#include <vector>

#include "common/align.h"
#include "plan/layout.h"
#include "plan/validate.h"

namespace distca::plan {
namespace {

/// Rows of this rank's tensors, for a range of key/value heads.
struct Part {
  int64_t row, num_rows;
  int64_t kv_head_begin, kv_head_end;
  auto operator<=>(const Part&) const = default;
};
template <class Row>
Part part_of(const Row& r) {
  return {r.row, r.num_rows, r.kv_head_begin, r.kv_head_end};
}

/// Rows that go to a peer or come from it.
struct Message {
  int64_t peer;
  Part part;
  auto operator<=>(const Message&) const = default;
};

/// Rows in an arena that are sent home, or that were copied there from this rank's own tensor.
struct Move {
  int64_t phase, tensor, offset;
  Part part;  // of results: row 0
  int64_t peer;
  auto operator<=>(const Move&) const = default;
};

/// Bytes of an arena. Extents of different rounds from 1 on may overlap each other. None of them may overlap one of
/// round 0.
struct Extent {
  int64_t round, begin, end;
  auto operator<=>(const Extent&) const = default;
};

/// Rows of a document that lie on this rank.
struct Held {
  int64_t document, begin, end, row;
  auto operator<=>(const Held&) const = default;
};

constexpr int64_t kBase = 0;  // round of what is no message that comes home

/// The checks of check_consistency, and what they have found so far.
class Checker {
 public:
  explicit Checker(const SliceView& slice) : slice_(slice), h_(slice.header()) {}

  void run() {
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

 private:
  // ---- this rank's rows ----

  void find_rows() {
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

  /// This rank's segments of a document, ascending.
  std::span<const Held> held(int64_t document) const {
    const auto less = [](const Held& x, const Held& y) { return x.document < y.document; };
    const auto [first, last] = std::equal_range(held_.begin(), held_.end(), Held{document, 0, 0, 0}, less);
    return {first, last};
  }

  /// The entry of by_row_ that holds all of rows [row, row + num_rows), or null if none does.
  const Held* segment_of(int64_t row, int64_t num_rows) const {
    const auto after =
        std::upper_bound(by_row_.begin(), by_row_.end(), row, [](int64_t r, const Held& x) { return r < x.row; });
    if (after == by_row_.begin()) return nullptr;
    const Held& s = *std::prev(after);
    return row + num_rows <= s.row + (s.end - s.begin) ? &s : nullptr;
  }
  /// Whether rows [begin, begin + num_rows) of the document lie on this rank from `row` on.
  bool holds(int64_t row, int64_t num_rows, int64_t document, int64_t begin) const {
    const Held* const s = segment_of(row, num_rows);
    return s != nullptr && s->document == document && s->begin + (row - s->row) == begin;
  }

  int64_t stride(Phase p, Direction d, TensorKind kind, const Part& part) const {
    return row_format(slice_.heads().with_kv_heads(part.kv_head_end - part.kv_head_begin), p, d, kind).row_stride();
  }
  static Part heads_of(const GroupRow& g, int64_t num_rows = 0) {
    return {0, num_rows, g.kv_head_begin, g.kv_head_end};
  }

  // ---- what this rank computes ----

  /// Checks that tasks, blocks and gradients of the groups follow one another.
  void check_groups() const {
    int64_t next_task = 0, next_block = 0, next_grad = 0, index = 0, local_tasks = 0;
    for (const GroupRow& g : slice_.groups()) {
      check_plan(g.task_begin == next_task && g.task_end > next_task && g.block_begin == next_block &&
                     g.grad_begin == next_grad,
                 "group ", index, ": its tasks, blocks or gradients do not follow those of the group before");
      next_task = g.task_end;
      next_block += g.num_blocks;
      next_grad = g.grad_end;
      check_plan(g.is_local == (index < h_.num_local_groups), "group ", index, ": is_local = ", g.is_local);
      if (g.is_local != 0) local_tasks = g.task_end;
      int64_t kv_begin = INT64_MAX, kv_end = 0;
      for (const TaskRow& t :
           slice_.tasks().subspan(static_cast<size_t>(g.task_begin), static_cast<size_t>(g.task_end - g.task_begin))) {
        kv_begin = std::min(kv_begin, t.kv_begin);
        kv_end = std::max(kv_end, t.kv_end);
      }
      check_plan(kv_begin == g.kv_begin && kv_end == g.kv_end, "group ", index, ": its tasks see keys [", kv_begin,
                 ", ", kv_end, "), it has [", g.kv_begin, ", ", g.kv_end, ")");
      if (g.num_arena_blocks == 0)
        check_plan(g.forward_k == -1 && g.forward_v == -1 && g.backward_k == -1 && g.backward_v == -1, "group ", index,
                   ": arena offsets of keys that do not travel");
      ++index;
    }
    check_plan(next_task == std::ssize(slice_.tasks()) && next_block == std::ssize(slice_.blocks()) &&
                   next_grad == std::ssize(slice_.grads()),
               "tasks, blocks or gradients belong to no group");
    check_plan(local_tasks == h_.num_local_tasks, "it says ", h_.num_local_tasks, " local tasks of ", local_tasks);
  }

  /// Checks that a block whose visible keys lie in one segment of this rank is read there. All other blocks follow one
  /// another in the arena; rows of them that this rank has are copied there.
  void check_blocks() {
    const int64_t size = h_.key_block_rows;
    int64_t index = 0;
    for (const GroupRow& g : slice_.groups()) {
      const std::span<const Held> here = held(g.document);
      int64_t arena_row = 0, rows_of_others = 0;
      size_t next = 0;  // first segment that ends after the block's first key
      for (int64_t b = 0; b < g.num_blocks; ++b) {
        const int64_t start = (g.first_block + b) * size;
        const int64_t begin = std::max(start, g.kv_begin), end = std::min(start + size, g.kv_end);
        while (next < here.size() && here[next].end <= begin) ++next;
        const bool local = next < here.size() && here[next].begin <= begin && here[next].end >= end;
        const int64_t entry =
            local ? block_entry(here[next].row + (start - here[next].begin), false) : block_entry(arena_row, true);
        check_plan(slice_.blocks()[static_cast<size_t>(g.block_begin + b)] == entry, "group ", index, " (document ",
                   g.document, "): key block ", b, " is not where its rows are");
        if (local) continue;
        rows_of_others += end - begin;
        for (size_t s = next; s < here.size() && here[s].begin < end; ++s) {
          const int64_t first = std::max(begin, here[s].begin), last = std::min(end, here[s].end);
          rows_of_others -= last - first;
          expect_copy(g, here[s].row + (first - here[s].begin), last - first, arena_row + (first - start));
        }
        arena_row += size;
      }
      check_plan(arena_row == g.num_arena_blocks * size, "group ", index, ": it has ", arena_row / size,
                 " key blocks in the arena and says ", g.num_arena_blocks);
      needs_others_ = needs_others_ || rows_of_others > 0;
      resends_others_ = resends_others_ || (rows_of_others > 0 && g.retained_k < 0);
      ++index;
    }
  }

  void expect_copy(const GroupRow& g, int64_t row, int64_t num_rows, int64_t arena_row) {
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

  /// Merges moves of rows that are next to each other. Cuts at the borders of blocks therefore do not count.
  void merge(std::vector<Move>& moves) const {
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

  /// Checks that this rank copies exactly those of its own rows into blocks that are needed there.
  void check_copies(Phase p) {
    std::vector<Move> expected, made;
    for (const Move& m : copies_)
      if (m.phase == static_cast<int64_t>(p)) expected.push_back(m);
    for (const SendRow& s : slice_.sends(p))
      if (s.peer == h_.rank) made.push_back({static_cast<int64_t>(p), s.tensor, s.target, part_of(s), s.peer});
    merge(expected);
    merge(made);
    check_plan(expected == made, "this rank's own keys are not all copied to where its tasks read them, each once");
  }

  void check_tasks() const {
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

  void check_gradients() const {
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

  // ---- what is sent home ----

  /// Checks that every result of rows of another rank is sent home once, and that nothing but results is sent home.
  void check_results(Phase p) {
    std::vector<Move> results, sent;
    const auto phase = static_cast<int64_t>(p);
    const auto add = [&](TensorKind kind, int64_t offset, const Part& part, int64_t peer) {
      results.push_back({phase, static_cast<int64_t>(kind), offset, part, peer});
    };
    for (const TaskRow& t : slice_.tasks()) {
      if (t.home == h_.rank) continue;
      const Part part = heads_of(slice_.groups()[static_cast<size_t>(t.group)], t.q_end - t.q_begin);
      if (p == Phase::kForward) {
        add(TensorKind::kOut, t.forward_q, part, t.home);
        add(TensorKind::kLse, t.forward_lse, part, t.home);
      } else {
        add(TensorKind::kDq, t.backward_dout, part, t.home);
      }
    }
    for (const SendRow& s : slice_.sends(p)) {
      if (s.direction != static_cast<int64_t>(Direction::kOut)) continue;
      check_plan(s.row == -1, "results are sent from row ", s.row, " of this rank");
      sent.push_back({phase, s.tensor, s.source, {0, s.num_rows, s.kv_head_begin, s.kv_head_end}, s.peer});
    }
    if (p == Phase::kBackward) add_gradients(results, sent);
    std::sort(results.begin(), results.end());
    std::sort(sent.begin(), sent.end());
    check_plan(results == sent, p == Phase::kForward ? "outputs" : "gradients",
               " that this rank computes for others are not all sent home, each once");
  }

  /// Adds the key gradients to the results. Any rank may be the home of a key gradient; it is the peer to which the
  /// gradient is sent. Gradients that are sent nowhere must be the first terms of sums of this rank's own rows.
  void add_gradients(std::vector<Move>& results, const std::vector<Move>& sent) {
    std::vector<Move> by_offset = sent;
    std::sort(by_offset.begin(), by_offset.end());
    for (const GroupRow& g : slice_.groups()) {
      for (int64_t i = g.grad_begin; i < g.grad_end; ++i) {
        const GradRow& r = slice_.grads()[static_cast<size_t>(i)];
        if (r.target == static_cast<int64_t>(GradTarget::kReturned)) continue;
        const bool partial = r.target == static_cast<int64_t>(GradTarget::kPartial);
        for (const auto& [kind, offset] : {std::pair{partial ? TensorKind::kDkPartial : TensorKind::kDk, r.dk},
                                           {partial ? TensorKind::kDvPartial : TensorKind::kDv, r.dv}}) {
          Move m = {static_cast<int64_t>(Phase::kBackward), static_cast<int64_t>(kind), offset,
                    heads_of(g, r.end - r.begin), 0};
          const auto at =
              std::lower_bound(by_offset.begin(), by_offset.end(), Move{m.phase, m.tensor, m.offset, {}, 0});
          if (at == by_offset.end() || at->tensor != m.tensor || at->offset != m.offset) {
            own_terms_.push_back({m, g.document, r.begin});
            continue;
          }
          m.peer = at->peer;
          results.push_back(m);
        }
      }
    }
  }

  // ---- what comes home ----

  /// Checks that exactly those queries leave whose results come home, with all that belongs to them, and from the same
  /// peer. Keys leave with their values.
  void check_messages() {
    const std::vector<Message> out = received(Phase::kForward, TensorKind::kOut);
    const auto check_same = [&](const std::vector<Message>& other, const char* what) {
      check_plan(other == out, what, " are not those whose outputs come home");
    };
    check_same(received(Phase::kForward, TensorKind::kLse), "log-sum-exp rows that come home");
    check_same(received(Phase::kBackward, TensorKind::kDq), "query gradients that come home");
    check_same(sent(Phase::kForward, TensorKind::kQ), "queries that are sent");
    for (TensorKind kind : {TensorKind::kQ, TensorKind::kDout, TensorKind::kLse, TensorKind::kDelta})
      check_same(sent(Phase::kBackward, kind), "rows that are sent for backward");
    const std::vector<Message> keys = sent(Phase::kForward, TensorKind::kK);
    const std::vector<Message> keys_again = sent(Phase::kBackward, TensorKind::kK);
    check_plan(sent(Phase::kForward, TensorKind::kV) == keys && sent(Phase::kBackward, TensorKind::kV) == keys_again,
               "keys are not sent with their values");
    check_plan(h_.retains != 0 ? std::includes(keys.begin(), keys.end(), keys_again.begin(), keys_again.end())
                               : keys == keys_again,
               "keys that are sent for backward are not those of forward");
  }

  std::vector<Message> received(Phase p, TensorKind kind) const {
    std::vector<Message> messages;
    for (const ReceiveRow& r : slice_.receives(p))
      if (r.tensor == static_cast<int64_t>(kind)) messages.push_back({r.peer, part_of(r)});
    std::sort(messages.begin(), messages.end());
    return messages;
  }
  std::vector<Message> sent(Phase p, TensorKind kind) const {
    std::vector<Message> messages;
    for (const SendRow& s : slice_.sends(p)) {
      if (s.direction != static_cast<int64_t>(Direction::kIn) || s.tensor != static_cast<int64_t>(kind)) continue;
      check_plan(s.source == -1 && s.round == 0, "rows of this rank are sent from the arena");
      check_plan(segment_of(s.row, s.num_rows) != nullptr, "rows [", s.row, ", ", s.row + s.num_rows,
                 ") are sent, which are not of one segment");
      if (s.peer != h_.rank) messages.push_back({s.peer, part_of(s)});
    }
    std::sort(messages.begin(), messages.end());
    return messages;
  }

  /// Checks that partial key gradients of the same rows are added into one place, and that the first of them starts it.
  void check_sums() {
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
      return std::tuple(x->tensor, x->sum, x->round, x) < std::tuple(y->tensor, y->sum, y->round, y);
    });
    for (size_t i = 0; i < terms.size();) {
      const ReceiveRow& first = *terms[i];
      const size_t begin = i;
      for (; i < terms.size() && terms[i]->sum == first.sum && terms[i]->tensor == first.tensor; ++i) {
        const bool assigns = terms[i]->action == static_cast<int64_t>(ReceiveAction::kAssign);
        check_plan(part_of(*terms[i]) == part_of(first) && (i == begin || !assigns),
                   "terms of one sum are not of the same rows, or start it twice");
      }
      sums_.push_back({static_cast<int64_t>(Phase::kBackward), first.tensor, first.sum, part_of(first), 0});
      const auto own = std::find_if(own_terms_.begin(), own_terms_.end(), [&](const OwnTerm& t) {
        return t.move.tensor == first.tensor && t.move.offset == first.sum;
      });
      const bool starts = first.action == static_cast<int64_t>(ReceiveAction::kAssign);
      check_plan(starts == (own == own_terms_.end()), "a sum of key gradients has no first term, or two");
      if (own == own_terms_.end()) continue;
      const Part& part = own->move.part;
      check_plan(part.num_rows == first.num_rows && part.kv_head_begin == first.kv_head_begin &&
                     part.kv_head_end == first.kv_head_end &&
                     holds(first.row, first.num_rows, own->document, own->begin),
                 "this rank's own term of a sum is of other rows");
      own_terms_.erase(own);
    }
    check_plan(own_terms_.empty(), "key gradients are computed that are neither returned nor sent nor added");
  }

  // ---- exactly once ----

  /// Checks that every row and head of a returned tensor comes from one place.
  void check_returned(TensorKind kind) {
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
      const TensorKind partial = kind == TensorKind::kDk ? TensorKind::kDkPartial : TensorKind::kDvPartial;
      for (const Move& s : sums_)
        if (s.tensor == static_cast<int64_t>(partial)) parts_.push_back(s.part);
    } else {
      for (const TaskRow& t : slice_.tasks()) {
        const GroupRow& g = slice_.groups()[static_cast<size_t>(t.group)];
        if (t.home == h_.rank) parts_.push_back({t.home_row, t.q_end - t.q_begin, g.kv_head_begin, g.kv_head_end});
      }
    }
    const Phase p = kind == TensorKind::kOut || kind == TensorKind::kLse ? Phase::kForward : Phase::kBackward;
    for (const ReceiveRow& r : slice_.receives(p))
      if (r.tensor == static_cast<int64_t>(kind)) parts_.push_back(part_of(r));
    check_tiles(kind);
  }

  /// Checks that the parts tile the returned tensor. For all heads between two neighbouring borders of parts, a row is
  /// in the same parts.
  void check_tiles(TensorKind kind) {
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

  // ---- waits ----

  void check_waits(Phase p) const {
    std::vector<std::pair<int64_t, int64_t>> home, awaited_home;  // (round, peer)
    std::vector<int64_t> in;
    const WaitRow* last = nullptr;
    for (const WaitRow& w : slice_.waits(p)) {
      check_plan(last == nullptr ||
                     std::tie(last->direction, last->round, last->peer) < std::tie(w.direction, w.round, w.peer),
                 "wait for rank ", w.peer, ": out of order");
      last = &w;
      if (w.direction == static_cast<int64_t>(Direction::kIn))
        in.push_back(w.peer);
      else
        awaited_home.emplace_back(w.round, w.peer);
    }
    for (const ReceiveRow& r : slice_.receives(p)) {
      check_plan(r.peer != h_.rank, "rows come home from their own rank");
      home.emplace_back(r.round, r.peer);
    }
    std::sort(home.begin(), home.end());
    home.erase(std::unique(home.begin(), home.end()), home.end());
    check_plan(home == awaited_home, "it does not wait for exactly the ranks from which rows come home");
    for (const TaskRow& t : slice_.tasks())
      check_plan(t.home == h_.rank || std::binary_search(in.begin(), in.end(), t.home), "it does not wait for rank ",
                 t.home, ", whose rows it computes");
    const bool needs = p == Phase::kForward ? needs_others_ : resends_others_;
    check_plan(!needs || !in.empty(), "it does not wait for keys of others");
  }

  // ---- memory ----

  void check_arena(Phase p) {
    extents_.clear();
    const bool backward = p == Phase::kBackward;
    const auto add = [&](Direction d, TensorKind kind, const Part& part, int64_t offset, int64_t round = kBase) {
      extents_.push_back({round, offset, offset + part.num_rows * stride(p, d, kind, part)});
    };
    for (const GroupRow& g : slice_.groups()) {
      const Part part = heads_of(g, g.num_arena_blocks * h_.key_block_rows);
      if (part.num_rows == 0 || (backward && g.retained_k >= 0)) continue;
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
      add(Direction::kOut, static_cast<TensorKind>(r.tensor), part_of(r), r.source, r.round + 1);
    check_disjoint("arena", h_.arena_bytes[static_cast<size_t>(p)]);
  }

  /// Checks that no two things are sent to one place of a peer's arena, and that all that goes home to a peer goes in
  /// one round.
  void check_targets(Phase p) {
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
      check_plan(a.round == b.round, "rows go home to rank ", b.peer, " in rounds ", a.round, " and ", b.round);
    }
  }

  void check_retained() {
    extents_.clear();
    for (const GroupRow& g : slice_.groups()) {
      if (g.retained_k < 0) continue;
      const Part part = heads_of(g, g.num_arena_blocks * h_.key_block_rows);
      for (const auto& [kind, at] : {std::pair{TensorKind::kK, g.retained_k}, {TensorKind::kV, g.retained_v}})
        extents_.push_back({kBase, at, at + part.num_rows * stride(Phase::kForward, Direction::kIn, kind, part)});
    }
    check_disjoint("retained memory", h_.retained_bytes);
  }

  /// Checks that no two extents overlap, that what comes home lies behind everything else, and that the memory asked
  /// for is the memory used.
  void check_disjoint(const char* memory, int64_t size) {
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

  struct OwnTerm {
    Move move;
    int64_t document, begin;
  };

  const SliceView& slice_;
  const Header& h_;
  std::vector<Held> held_;          // by document
  std::vector<Held> by_row_;        // by row; segments that continue one another are one
  std::vector<Move> copies_;        // copies that this rank has to make
  std::vector<OwnTerm> own_terms_;  // key gradients of this rank that start sums
  std::vector<Move> sums_;
  bool needs_others_ = false, resends_others_ = false;  // tasks need keys of other ranks in forward, in backward
  std::vector<Part> parts_;
  std::vector<int64_t> heads_;
  std::vector<Extent> extents_;
};

}  // namespace

void check_consistency(const SliceView& slice) { Checker(slice).run(); }

}  // namespace distca::plan
