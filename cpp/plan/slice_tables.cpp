#include "plan/slice_tables.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "common/align.h"

namespace distca::plan {
namespace {

/// Fills the tables of one rank.
class Filler {
 public:
  Filler(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks, const Arrangement& arrangement,
         int64_t rank, bool with_blocks, SliceTables& tables)
      : layout_(layout),
        options_(options),
        heads_(options.heads),
        block_rows_(options.key_block_rows),
        tasks_(tasks),
        a_(arrangement),
        rank_(rank),
        with_blocks_(with_blocks),
        t_(tables) {}

  void run() {
    clear();
    t_.scores.assign(options_.scores.begin(), options_.scores.end());
    add_shared();
    add_bidirectional();
    add_whole_documents();
    for (uint32_t g : a_.groups_of_server[rank_]) add_group(a_.groups[g]);
    int64_t row = 0;
    for (const Segment& s : layout_.ranks()[static_cast<size_t>(rank_)]) {
      add(t_.segments, {s.document, s.document == kPadding ? 0 : options_.scores_of(s.document), s.begin, s.end});
      if (s.document != kPadding) send_keys({s.document, s.begin, s.end, rank_, row});
      row += s.num_rows();
    }
    for (uint32_t i : a_.remote_of_home[rank_]) exchange_as_home(a_.remote[i]);
    for (uint32_t i : a_.remote_of_server[rank_]) exchange_as_server(a_.remote[i]);
    for (uint32_t i : a_.gradients_of_home[rank_]) receive_gradient(a_.gradients[i]);
    for (uint32_t i : a_.own_sums_of_home[rank_]) finish_sum(a_.sums[i]);
    put_in_order();
  }

 private:
  void clear() {
    t_.shared.clear();
    t_.bidirectional.clear();
    t_.groups.clear();
    t_.tasks.clear();
    t_.blocks.clear();
    t_.grads.clear();
    t_.segments.clear();
    for (auto& sends : t_.sends) sends.clear();
    for (auto& receives : t_.receives) receives.clear();
    for (auto& waits : t_.waits) waits.clear();
  }

  /// Writes the row in its place. Copying a row right after it was written would make the processor wait.
  template <class Row>
  static void add(Rows<Row>& rows, const Row& row) {
    rows.emplace_back() = row;
  }

  RowFormat format(Phase p, Direction d, TensorKind kind, int64_t kv_heads) const {
    return row_format(heads_.with_kv_heads(kv_heads), p, d, kind);
  }

  // ---- what this rank computes ----

  /// Adds the bidirectional rows of each document of which this rank computes a task.
  void add_bidirectional() {
    first_bidirectional_.clear();
    if (!layout_.has_bidirectional()) return;
    for (auto t = first_task(); t != tasks_.end() && t->server == rank_; ++t) {
      const auto rows = layout_.bidirectional(t->document);
      if (rows.empty() || !first_bidirectional_.emplace(t->document, std::ssize(t_.bidirectional)).second) continue;
      t_.bidirectional.insert(t_.bidirectional.end(), rows.begin(), rows.end());
    }
  }

  /// Adds what the documents begin with of which this rank holds or computes rows.
  void add_shared() {
    if (!layout_.has_shared()) return;
    std::set<int64_t> documents;
    for (const Segment& s : layout_.ranks()[static_cast<size_t>(rank_)])
      if (s.document != kPadding) documents.insert(s.document);
    for (auto t = first_task(); t != tasks_.end() && t->server == rank_; ++t) documents.insert(t->document);
    for (int64_t document : documents)
      for (const SharedRows& rows : layout_.shared(document)) add(t_.shared, rows);
  }

  std::span<const Task>::iterator first_task() const {
    return std::lower_bound(tasks_.begin(), tasks_.end(), rank_,
                            [](const Task& t, int64_t rank) { return t.server < rank; });
  }

  void add_whole_documents() {
    for (auto t = first_task(); t != tasks_.end() && t->server == rank_; ++t) {
      if (!is_whole_at_home(layout_, heads_, *t)) continue;
      Group g;
      g.server = rank_;
      g.document = t->document;
      g.kv_head_end = heads_.kv_heads;
      g.kv_end = t->kv_end;
      g.task_begin = static_cast<size_t>(t - tasks_.begin());
      g.task_end = g.task_begin + 1;
      add_group(g);
      add(t_.grads, {0, g.kv_end, static_cast<int64_t>(GradTarget::kReturned), t->home_row, -1, -1});
      t_.groups.back().grad_end = std::ssize(t_.grads);
    }
  }

  void add_group(const Group& g) {
    const int64_t index = std::ssize(t_.groups);
    const KeyPool pool = a_.pool_of(g);
    GroupRow& row = t_.groups.emplace_back();
    row.document = g.document;
    row.scores = options_.scores_of(g.document);
    const auto found = first_bidirectional_.find(g.document);
    row.bidirectional_begin = found == first_bidirectional_.end() ? 0 : found->second;
    row.bidirectional_end = row.bidirectional_begin + std::ssize(layout_.bidirectional(g.document));
    row.kv_head_begin = g.kv_head_begin;
    row.kv_head_end = g.kv_head_end;
    row.kv_begin = g.kv_begin;
    row.kv_end = g.kv_end;
    row.first_block = g.kv_begin / block_rows_;
    row.num_blocks = ceil_div(g.kv_end, block_rows_) - row.first_block;
    row.block_begin = num_blocks_;
    num_blocks_ += row.num_blocks;
    row.num_arena_rows = pool.num_rows;
    row.forward_k = pool.k[0];
    row.forward_v = pool.v[0];
    row.backward_k = pool.k[1];
    row.backward_v = pool.v[1];
    row.retained_k = g.retained_k;
    row.retained_v = g.retained_v;
    row.round = g.round;
    if (with_blocks_) add_blocks(g);
    for_each_source(layout_, a_.arrivals_of(g), g, [&](const Placement& rows) {
      wait(Phase::kForward, Direction::kIn, g.round, rows.rank);
      if (!g.is_retained()) wait(Phase::kBackward, Direction::kIn, g.round, rows.rank);
    });
    row.task_begin = std::ssize(t_.tasks);
    for (size_t i = g.task_begin; i < g.task_end; ++i) add_task(tasks_[i], index);
    row.task_end = std::ssize(t_.tasks);
    row.grad_begin = std::ssize(t_.grads);
    for (size_t i = g.gradient_begin; i < g.gradient_end; ++i) add_gradient(a_.gradients[i]);
    row.grad_end = std::ssize(t_.grads);
  }

  void add_blocks(const Group& g) {
    const int64_t first = g.kv_begin / block_rows_, base = std::ssize(t_.blocks);
    t_.blocks.resize(static_cast<size_t>(base + ceil_div(g.kv_end, block_rows_) - first));
    const auto fill = [&](int64_t begin, int64_t end, int64_t row, bool in_arena) {
      for (int64_t b = begin; b < end; ++b, row += block_rows_)
        t_.blocks[static_cast<size_t>(base + b - first)] = block_entry(row, in_arena);
    };
    for (const ArenaBlocks& blocks : a_.arena_blocks_of(g)) fill(blocks.begin, blocks.end, blocks.row, true);
    for (const Placement& p : layout_.key_placements(g.document)) {
      const BlockRange local = local_blocks(g, p, block_rows_);
      fill(local.begin, local.end, p.row + (local.begin * block_rows_ - p.begin), false);
    }
  }

  void add_task(const Task& t, int64_t group) {
    TaskRow& row = t_.tasks.emplace_back();
    row = {group, t.q_begin, t.q_end, t.kv_begin, t.kv_end, t.home, t.home_row, -1, -1, -1, -1, -1, -1};
    if (t.home != rank_) {  // in the order of a_.remote
      const RemoteTask& r = a_.remote[a_.remote_of_server[rank_][next_remote_++]];
      row.forward_q = r.forward_q;
      row.forward_lse = r.forward_lse;
      row.backward_q = r.backward_q;
      row.backward_dout = r.backward_dout;
      row.backward_lse = r.backward_lse;
      row.backward_delta = r.backward_delta;
    }
  }

  void add_gradient(const KeyGradient& g) {
    const bool returned = g.target == GradTarget::kReturned;
    add(t_.grads, {g.begin, g.end, static_cast<int64_t>(g.target), returned ? g.home_row : -1, g.dk, g.dv});
    if (g.home == rank_ || g.is_added()) return;
    const Group& group = a_.groups[g.group];
    const auto send_home = [&](TensorKind kind, int64_t source, int64_t target) {
      send(Phase::kBackward, Direction::kOut, g.round, g.last_round, g.home, kind, -1, source, g.end - g.begin,
           group.kv_head_begin, group.kv_head_end, target);
    };
    send_home(g.dk_kind(), g.dk, g.home_dk);
    send_home(g.dv_kind(), g.dv, g.home_dv);
  }

  // ---- rows that travel ----

  void send(Phase p, Direction d, int64_t round, int64_t after, int64_t peer, TensorKind kind, int64_t row,
            int64_t source, int64_t num_rows, int64_t kv_head_begin, int64_t kv_head_end, int64_t target) {
    add(t_.sends[static_cast<size_t>(p)], {static_cast<int64_t>(d), round, after, peer, static_cast<int64_t>(kind), row,
                                           source, num_rows, kv_head_begin, kv_head_end, target});
  }
  void wait(Phase p, Direction d, int64_t round, int64_t peer) {
    auto& waits = t_.waits[static_cast<size_t>(p)];
    const WaitRow row = {static_cast<int64_t>(d), round, peer};
    if (waits.empty() || key_of(waits.back()) != key_of(row)) add(waits, row);
  }
  static std::tuple<int64_t, int64_t, int64_t> key_of(const WaitRow& w) { return {w.direction, w.round, w.peer}; }

  /// Sends keys of one of this rank's segments to the servers that need them, and copies those that lie in a block
  /// which this rank itself assembles.
  void send_keys(const Placement& segment) {
    layout_.for_each_reader(segment.document, [&](const SharedRows& rows) {
      const Placement seen = segment.within(rows.begin, rows.end);
      if (seen.begin < seen.end) send_keys(seen.later(rows.shift()), rows.document);
    });
  }
  void send_keys(const Placement& segment, int64_t reader) {
    for (uint32_t i : a_.groups_of_document[reader]) {
      const Group& g = a_.groups[i];
      const auto arrivals = a_.arrivals_of(g);
      auto arrival = std::ranges::upper_bound(arrivals, segment.begin, {}, &Arrival::end);
      for (; arrival != arrivals.end() && arrival->begin < segment.end; ++arrival) put_keys(g, segment, *arrival);
    }
  }

  /// Puts the keys that a segment and an arrival of a group have in common.
  void put_keys(const Group& g, const Placement& segment, const Arrival& arrival) {
    const Placement rows = segment.within(arrival.begin, arrival.end);
    const KeyPool pool = a_.pool_of(g);
    const int64_t arena_row = arrival.row + (rows.begin - arrival.begin);
    for (Phase phase : kPhases) {
      if (phase == Phase::kBackward && g.is_retained()) continue;
      const auto p = static_cast<size_t>(phase);
      const auto put = [&](TensorKind kind, int64_t base) {
        const int64_t stride = format(phase, Direction::kIn, kind, g.num_kv_heads()).row_stride();
        send(phase, Direction::kIn, g.round, 0, g.server, kind, rows.row, -1, rows.end - rows.begin, g.kv_head_begin,
             g.kv_head_end, base + arena_row * stride);
      };
      put(TensorKind::kK, pool.k[p]);
      put(TensorKind::kV, pool.v[p]);
    }
  }

  void exchange_as_home(const RemoteTask& r) {
    const Task& t = tasks_[r.task];
    const auto put = [&](Phase phase, TensorKind kind, int64_t target) {
      send(phase, Direction::kIn, a_.groups[r.group].round, 0, t.server, kind, t.home_row, -1, t.num_rows(),
           t.kv_head_begin, t.kv_head_end, target);
    };
    put(Phase::kForward, TensorKind::kQ, r.forward_q);
    put(Phase::kBackward, TensorKind::kQ, r.backward_q);
    put(Phase::kBackward, TensorKind::kDout, r.backward_dout);
    put(Phase::kBackward, TensorKind::kLse, r.backward_lse);
    put(Phase::kBackward, TensorKind::kDelta, r.backward_delta);
    const auto receive = [&](Phase phase, int64_t round, TensorKind kind, int64_t source) {
      add(t_.receives[static_cast<size_t>(phase)],
          {round, t.server, static_cast<int64_t>(kind), static_cast<int64_t>(ReceiveAction::kCopy), t.home_row,
           t.num_rows(), t.kv_head_begin, t.kv_head_end, source, -1});
      wait(phase, Direction::kOut, round, t.server);
    };
    receive(Phase::kForward, 0, TensorKind::kOut, r.home_out);
    receive(Phase::kForward, 0, TensorKind::kLse, r.home_lse);
    receive(Phase::kBackward, r.round, TensorKind::kDq, r.home_dq);
  }

  void exchange_as_server(const RemoteTask& r) {
    const Task& t = tasks_[r.task];
    const int64_t round_in = a_.groups[r.group].round;
    const auto send_home = [&](Phase phase, int64_t round, TensorKind kind, int64_t source, int64_t target) {
      send(phase, Direction::kOut, round, round_in, t.home, kind, -1, source, t.num_rows(), t.kv_head_begin,
           t.kv_head_end, target);
    };
    send_home(Phase::kForward, 0, TensorKind::kOut, r.forward_q, r.home_out);
    send_home(Phase::kForward, 0, TensorKind::kLse, r.forward_lse, r.home_lse);
    send_home(Phase::kBackward, r.round, TensorKind::kDq, r.backward_dout, r.home_dq);
    for (Phase phase : kPhases) wait(phase, Direction::kIn, round_in, t.home);
  }

  /// Takes in a gradient that comes home.
  void receive_gradient(const KeyGradient& g) {
    const Group& group = a_.groups[g.group];
    const KeyGradientSum* const sum = g.sum < 0 ? nullptr : &a_.sums[static_cast<size_t>(g.sum)];
    const ReceiveAction action = sum == nullptr ? ReceiveAction::kCopy
                                 : g.is_first   ? ReceiveAction::kAssign
                                                : ReceiveAction::kAdd;
    const auto receive = [&](TensorKind kind, int64_t source, int64_t place_of_sum) {
      add(t_.receives[1], {g.round, group.server, static_cast<int64_t>(kind), static_cast<int64_t>(action), g.home_row,
                           g.end - g.begin, group.kv_head_begin, group.kv_head_end, source, place_of_sum});
    };
    receive(g.dk_kind(), g.home_dk, sum == nullptr ? -1 : sum->dk);
    receive(g.dv_kind(), g.home_dv, sum == nullptr ? -1 : sum->dv);
    wait(Phase::kBackward, Direction::kOut, g.round, group.server);
  }

  void finish_sum(const KeyGradientSum& s) {
    const auto finish = [&](TensorKind kind, int64_t place) {
      add(t_.receives[1], {0, rank_, static_cast<int64_t>(kind), static_cast<int64_t>(ReceiveAction::kFinish), s.row,
                           s.num_rows, s.kv_head_begin, s.kv_head_end, -1, place});
    };
    finish(TensorKind::kDkPartial, s.dk);
    finish(TensorKind::kDvPartial, s.dv);
  }

  // ---- order ----

  /// Sorts what a rank does. Every rank sends to itself first, then to the rank after it and so on. If all ranks began
  /// with rank 0, its link would be full and all others empty.
  void put_in_order() {
    for (auto& sends : t_.sends) {
      std::stable_sort(sends.begin(), sends.end(), [](const SendRow& a, const SendRow& b) {
        return std::tuple(a.direction, a.message(), a.peer) < std::tuple(b.direction, b.message(), b.peer);
      });
      for (auto begin = sends.begin(); begin != sends.end();) {
        const auto end = std::find_if(begin, sends.end(), [&](const SendRow& s) {
          return s.direction != begin->direction || s.message() != begin->message();
        });
        std::rotate(begin, std::partition_point(begin, end, [&](const SendRow& s) { return s.peer < rank_; }), end);
        begin = end;
      }
    }
    for (auto& receives : t_.receives) {
      std::stable_sort(receives.begin(), receives.end(), [](const ReceiveRow& a, const ReceiveRow& b) {
        return std::tie(a.round, a.peer) < std::tie(b.round, b.peer);
      });
    }
    for (auto& waits : t_.waits) {
      std::sort(waits.begin(), waits.end(), [](const WaitRow& a, const WaitRow& b) { return key_of(a) < key_of(b); });
      waits.erase(std::unique(waits.begin(), waits.end(),
                              [](const WaitRow& a, const WaitRow& b) { return key_of(a) == key_of(b); }),
                  waits.end());
    }
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const HeadShape heads_;
  const int64_t block_rows_;
  const std::span<const Task> tasks_;
  const Arrangement& a_;
  const int64_t rank_;
  const bool with_blocks_;
  int64_t num_blocks_ = 0;
  size_t next_remote_ = 0;
  std::unordered_map<int64_t, int64_t> first_bidirectional_;  // of each document that has any: where its own begin
  SliceTables& t_;
};

}  // namespace

void fill_slice_tables(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks,
                       const Arrangement& arrangement, int64_t rank, bool with_blocks, SliceTables& tables) {
  Filler(layout, options, tasks, arrangement, rank, with_blocks, tables).run();
}

}  // namespace distca::plan
