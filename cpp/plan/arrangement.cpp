#include "plan/arrangement.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "common/align.h"
#include "plan/limits.h"
#include "plan/row_ranges.h"

namespace distca::plan {
namespace {

/// Makes an arrangement. It is the planning part of the in-place buffer manager: it gives every extent of the arenas
/// its offset.
class Arranger {
 public:
  Arranger(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks)
      : layout_(layout),
        options_(options),
        heads_(options.heads),
        retain_bytes_(options.retain_bytes),
        ranks_per_node_(ranks_of_node(layout, options)),
        tasks_(tasks) {}

  Arrangement run() {
    const auto n = static_cast<size_t>(layout_.num_ranks());
    for (auto& arenas : a_.arenas) arenas.assign(n, {});
    make_groups();
    a_.groups_of_server.fill(n, a_.groups.size(), [&](size_t i) { return a_.groups[i].server; });
    a_.groups_of_document.fill(static_cast<size_t>(layout_.num_documents()), a_.groups.size(),
                               [&](size_t i) { return a_.groups[i].document; });
    a_.remote_of_server.fill(n, a_.remote.size(), [&](size_t i) { return tasks_[a_.remote[i].task].server; });
    a_.remote_of_home.fill(n, a_.remote.size(), [&](size_t i) { return tasks_[a_.remote[i].task].home; });
    a_.retained_bytes.assign(n, 0);
    for (size_t server = 0; server < retain_bytes_.size(); ++server)
      if (retain_bytes_[server] > 0) retain_keys(static_cast<int64_t>(server));
    carve_server_in();
    carve_scratch(split_key_gradients(layout_, options_, a_));
    a_.num_rounds.assign(n, 1);
    for (int64_t home = 0; home < layout_.num_ranks(); ++home) {
      bring_out_home(home);
      bring_gradients_home(home);
    }
    return std::move(a_);
  }

 private:
  RowFormat format(Phase p, Direction d, TensorKind kind, int64_t kv_heads) const {
    return row_format(heads_.with_kv_heads(kv_heads), p, d, kind);
  }
  ArenaBytes& arena(Phase p, int64_t rank) { return a_.arenas[static_cast<size_t>(p)][static_cast<size_t>(rank)]; }

  /// Takes the next extent of a growing part of an arena. Returns its offset from the start of the part.
  int64_t take(int64_t& part, Phase p, Direction d, TensorKind kind, int64_t kv_heads, int64_t num_rows) const {
    const int64_t bytes = num_rows * format(p, d, kind, kv_heads).row_stride();
    const int64_t offset = part;
    part += round_up(bytes, kExtentAlignment);
    return offset;
  }
  void count_bytes(Phase p, Direction d, TensorKind kind, int64_t home, int64_t server, int64_t kv_heads,
                   int64_t num_rows) {
    const auto message = 2 * static_cast<size_t>(p) + static_cast<size_t>(d);
    const int64_t bytes = num_rows * format(p, d, kind, kv_heads).wire_bytes();
    a_.bytes[message] += bytes;
    if (home / ranks_per_node_ != server / ranks_per_node_) a_.bytes_between_nodes[message] += bytes;
  }

  // ---- groups ----

  void make_groups() {
    std::vector<Group> waiting;  // groups of this server that need rows of others
    for (size_t begin = 0; begin < tasks_.size();) {
      const int64_t server = tasks_[begin].server;
      waiting.clear();
      while (begin < tasks_.size() && tasks_[begin].server == server) {
        if (is_whole_at_home(layout_, heads_, tasks_[begin])) {
          ++begin;
          continue;
        }
        const Group g = next_group(begin);
        (g.is_local() ? a_.groups : waiting).push_back(g);
        begin = g.task_end;
      }
      deal_into_rounds(waiting);
      // Of what several groups contribute to, the first writes most of it. Others then add in few pieces.
      if (layout_.has_shared())
        std::stable_sort(waiting.begin(), waiting.end(), [](const Group& a, const Group& b) {
          return a.round != b.round ? a.round < b.round : a.kv_end > b.kv_end;
        });
      place_keys(layout_, options_, a_, waiting);
      for (const Group& g : waiting) add_waiting_group(g);
    }
  }

  /// The group that starts with this task. With a window, a document may have several groups at a server.
  Group next_group(size_t begin) const {
    const Task& first = tasks_[begin];
    Group g;
    g.server = first.server;
    g.document = first.document;
    g.kv_head_begin = first.kv_head_begin;
    g.kv_head_end = first.kv_head_end;
    g.kv_begin = first.kv_begin;
    g.kv_end = first.kv_end;
    bool is_local = true;
    size_t end = begin;
    for (; end < tasks_.size(); ++end) {
      const Task& t = tasks_[end];
      if (t.server != g.server || t.document != g.document || t.kv_head_begin != g.kv_head_begin ||
          t.kv_begin > g.kv_end)
        break;
      g.kv_end = std::max(g.kv_end, t.kv_end);
      is_local = is_local && t.home == g.server;
    }
    g.task_begin = begin;
    g.task_end = end;
    const auto placements = layout_.key_placements(g.document);
    is_local = is_local && std::any_of(placements.begin(), placements.end(), [&](const Placement& p) {
                 return p.rank == g.server && p.begin <= g.kv_begin && p.end >= g.kv_end;
               });
    g.round = is_local ? -1 : 0;
    return g;
  }

  /// What a group that needs rows of others brings to a round: bytes that come in forward, and the cost of its tasks.
  struct Weight {
    int64_t bytes = 0, cost = 0;
    size_t group = 0;
  };
  Weight weight_of(const Group& g, size_t index, int64_t key_bytes) const {
    const Document document = options_.document(layout_, g.document);
    const int64_t query = format(Phase::kForward, Direction::kIn, TensorKind::kQ, g.num_kv_heads()).wire_bytes();
    Weight weight = {.bytes = key_bytes, .group = index};
    for (const Task& t : tasks_.subspan(g.task_begin, g.task_end - g.task_begin)) {
      if (t.home != g.server) weight.bytes += t.num_rows() * query;
      weight.cost += options_.cost.cost(document, t.q_begin, t.q_end) * g.num_kv_heads();
    }
    return weight;
  }

  /// Deals the groups of a server that need rows of others into rounds of about the same cost, and sorts them by round.
  /// While the server computes a round, rows of the next one travel, and results of the one before. Groups of few bytes
  /// come first and last, because nothing hides the rows of the first round and the results of the last one.
  void deal_into_rounds(std::vector<Group>& waiting) {
    if (waiting.size() < 2) return;
    std::vector<Weight> by_bytes;
    int64_t bytes = 0;
    __int128 cost = 0;
    std::map<Owner, RowRanges> brought;
    for (const Group& g : waiting) {
      by_bytes.push_back(
          weight_of(g, by_bytes.size(), key_bytes_of_others(g, layout_.shares_rows(g.document) ? &brought : nullptr)));
      bytes += by_bytes.back().bytes;
      cost += by_bytes.back().cost;
    }
    const int64_t rounds =
        std::min({kMaxRoundsIn, std::ssize(waiting), std::max<int64_t>(1, bytes / options_.round_bytes)});
    if (rounds == 1 || cost == 0) return;
    std::stable_sort(by_bytes.begin(), by_bytes.end(),
                     [](const Weight& a, const Weight& b) { return a.bytes < b.bytes; });
    // Every second one from the smallest to the largest, then the others back to the smallest.
    std::vector<Weight> order;
    for (size_t i = 0; i < by_bytes.size(); i += 2) order.push_back(by_bytes[i]);
    for (size_t i = by_bytes.size() / 2; i-- > 0;) order.push_back(by_bytes[2 * i + 1]);
    // A group is in the round in which its middle lies. Rounds without a group are left out.
    __int128 twice_done = 0, last = -1;
    int64_t round = -1;
    for (const Weight& weight : order) {
      const __int128 middle = (twice_done + weight.cost) * rounds / (2 * cost);
      if (middle != last) ++round;
      last = middle;
      twice_done += 2 * static_cast<__int128>(weight.cost);
      waiting[weight.group].round = round;
    }
    std::stable_sort(waiting.begin(), waiting.end(), [](const Group& a, const Group& b) { return a.round < b.round; });
  }

  void add_waiting_group(const Group& g) {
    for (size_t t = g.task_begin; t < g.task_end; ++t) {
      if (tasks_[t].home == g.server) continue;
      RemoteTask r;
      r.task = t;
      r.group = a_.groups.size();
      a_.remote.push_back(r);
    }
    a_.groups.push_back(g);
  }

  // ---- rows from other homes ----

  /// The first head of a group, and the document whose own rows its keys are.
  using Owner = std::pair<int64_t, int64_t>;

  /// Bytes of the group's keys and values that lie on other ranks, in a phase. Those that `known` has do not count, and
  /// it has them all afterwards.
  int64_t key_bytes_of_others(const Group& g, std::map<Owner, RowRanges>* known = nullptr) const {
    int64_t num_rows = 0, bytes = 0;
    const auto count = [&](int64_t begin, int64_t end) { num_rows += end - begin; };
    for (const Placement& p : layout_.key_placements(g.document)) {
      const Placement rows = p.within(g.kv_begin, g.kv_end);
      if (rows.rank == g.server || rows.begin >= rows.end) continue;
      if (known == nullptr)
        count(rows.begin, rows.end);
      else
        (*known)[{g.kv_head_begin, rows.document}].add(rows.begin - rows.shift, rows.end - rows.shift, count);
    }
    for (TensorKind kind : {TensorKind::kK, TensorKind::kV})
      bytes += num_rows * format(Phase::kBackward, Direction::kIn, kind, g.num_kv_heads()).wire_bytes();
    return bytes;
  }

  /// Chooses the groups whose keys the server keeps for backward. Groups that save most bytes come first, and each that
  /// still fits is kept. Keys lie there group by group; those that documents share come once for all groups instead.
  void retain_keys(int64_t server) {
    const auto s = static_cast<size_t>(server);
    // (minus the bytes saved, first task, group). Groups lie in the order of their rounds; of those that save the same,
    // the order of tasks decides, because rounds must not decide what is kept.
    std::vector<std::tuple<int64_t, size_t, uint32_t>> by_bytes;
    for (uint32_t i : a_.groups_of_server[server])
      if (const int64_t bytes = key_bytes_of_others(a_.groups[i]);
          bytes > 0 && !layout_.shares_rows(a_.groups[i].document))
        by_bytes.emplace_back(-bytes, a_.groups[i].task_begin, i);
    std::sort(by_bytes.begin(), by_bytes.end());
    for (const auto& [minus_saved, first_task, i] : by_bytes) {
      Group& g = a_.groups[i];
      const int64_t rows = a_.pool_of(g).num_rows;
      int64_t end = a_.retained_bytes[s];
      const auto extent = [&](TensorKind kind) {
        return take(end, Phase::kForward, Direction::kIn, kind, g.num_kv_heads(), rows);
      };
      const int64_t k = extent(TensorKind::kK), v = extent(TensorKind::kV);
      if (end > retain_bytes_[s]) continue;
      g.retained_k = k;
      g.retained_v = v;
      a_.retained_bytes[s] = end;
      a_.saved_bytes -= minus_saved;
    }
  }

  void carve_server_in() {
    for (const Group& g : a_.groups) {
      if (g.pool < 0) continue;
      KeyPool& pool = a_.pools[static_cast<size_t>(g.pool)];
      const bool is_first = pool.k[0] < 0;
      for (Phase phase : kPhases) {
        if (phase == Phase::kBackward && g.is_retained()) continue;
        for_each_source(layout_, a_.arrivals_of(g), g, [&](const Placement& rows) {
          for (TensorKind kind : {TensorKind::kK, TensorKind::kV})
            count_bytes(phase, Direction::kIn, kind, rows.rank, g.server, g.num_kv_heads(), rows.end - rows.begin);
        });
        if (!is_first) continue;
        const auto p = static_cast<size_t>(phase);
        int64_t& next = arena(phase, g.server).server_in;
        const int64_t rows = pool.num_rows;
        pool.k[p] = take(next, phase, Direction::kIn, TensorKind::kK, g.num_kv_heads(), rows);
        pool.v[p] = take(next, phase, Direction::kIn, TensorKind::kV, g.num_kv_heads(), rows);
      }
    }
    for (RemoteTask& r : a_.remote) {
      const Task& t = tasks_[r.task];
      const int64_t heads = t.kv_head_end - t.kv_head_begin;
      const auto fetch = [&](Phase phase, TensorKind kind) {
        count_bytes(phase, Direction::kIn, kind, t.home, t.server, heads, t.num_rows());
        return take(arena(phase, t.server).server_in, phase, Direction::kIn, kind, heads, t.num_rows());
      };
      r.forward_q = fetch(Phase::kForward, TensorKind::kQ);
      r.forward_lse = take(arena(Phase::kForward, t.server).server_in, Phase::kForward, Direction::kIn,
                           TensorKind::kLse, heads, t.num_rows());
      r.backward_q = fetch(Phase::kBackward, TensorKind::kQ);
      r.backward_dout = fetch(Phase::kBackward, TensorKind::kDout);
      r.backward_lse = fetch(Phase::kBackward, TensorKind::kLse);
      r.backward_delta = fetch(Phase::kBackward, TensorKind::kDelta);
    }
  }

  // ---- scratch of key gradients ----

  /// Carves scratch of the key gradients, which lies behind server-in: the sums of this home, then this server's
  /// contributions.
  void carve_scratch(int64_t num_contributions) {
    const auto extent = [&](int64_t rank, TensorKind kind, int64_t heads, int64_t rows) {
      ArenaBytes& bytes = arena(Phase::kBackward, rank);
      return bytes.server_in + take(bytes.scratch, Phase::kBackward, Direction::kOut, kind, heads, rows);
    };
    for (KeyGradientSum& s : a_.sums) {
      const int64_t heads = s.kv_head_end - s.kv_head_begin;
      s.dk = extent(s.home, TensorKind::kDkPartial, heads, s.num_rows);
      s.dv = extent(s.home, TensorKind::kDvPartial, heads, s.num_rows);
    }
    std::vector<const KeyGradient*> places(static_cast<size_t>(num_contributions));
    for (KeyGradient& g : a_.gradients) {
      const Group& group = a_.groups[g.group];
      if (g.target == GradTarget::kReturned) continue;
      if (g.is_added()) {
        const KeyGradient& written = *places[static_cast<size_t>(g.place)];
        const auto rows_before = [&](TensorKind kind) {
          return (g.home_row - written.home_row) *
                 format(Phase::kBackward, Direction::kOut, kind, group.num_kv_heads()).row_stride();
        };
        g.dk = written.dk + rows_before(TensorKind::kDkPartial);
        g.dv = written.dv + rows_before(TensorKind::kDvPartial);
        continue;
      }
      if (group.server == g.home) {
        const KeyGradientSum& sum = a_.sums[static_cast<size_t>(g.sum)];
        g.dk = sum.dk;
        g.dv = sum.dv;
      } else {
        const int64_t rows = g.end - g.begin, heads = group.num_kv_heads();
        g.dk = extent(group.server, g.dk_kind(), heads, rows);
        g.dv = extent(group.server, g.dv_kind(), heads, rows);
      }
      if (g.place >= 0) places[static_cast<size_t>(g.place)] = &g;
    }
  }

  // ---- rows that come home ----

  /// Takes the next extent of home-in, which is the last part of an arena.
  int64_t come_home(Phase phase, int64_t server, int64_t home, int64_t& used, TensorKind kind, int64_t heads,
                    int64_t rows) {
    const ArenaBytes& bytes = arena(phase, home);
    count_bytes(phase, Direction::kOut, kind, home, server, heads, rows);
    return bytes.server_in + bytes.scratch + take(used, phase, Direction::kOut, kind, heads, rows);
  }

  /// Places the messages of all servers to this home in one round, because each row comes home once.
  void bring_out_home(int64_t home) {
    int64_t used = 0;
    for (uint32_t i : a_.remote_of_home[home]) {
      RemoteTask& r = a_.remote[i];
      const Task& t = tasks_[r.task];
      const int64_t heads = t.kv_head_end - t.kv_head_begin;
      r.home_out = come_home(Phase::kForward, t.server, home, used, TensorKind::kOut, heads, t.num_rows());
      r.home_lse = come_home(Phase::kForward, t.server, home, used, TensorKind::kLse, heads, t.num_rows());
    }
    arena(Phase::kForward, home).home_in = used;
  }

  void bring_gradients_home(int64_t home) {
    const auto count = [&](TensorKind kind, int64_t server, int64_t heads, int64_t rows) {
      count_bytes(Phase::kBackward, Direction::kOut, kind, home, server, heads, rows);
    };
    for (uint32_t i : a_.remote_of_home[home]) {
      const Task& t = tasks_[a_.remote[i].task];
      count(TensorKind::kDq, t.server, t.kv_head_end - t.kv_head_begin, t.num_rows());
    }
    for (uint32_t i : a_.gradients_of_home[home]) {
      const KeyGradient& g = a_.gradients[i];
      const Group& group = a_.groups[g.group];
      count(g.dk_kind(), group.server, group.num_kv_heads(), g.end - g.begin);
      count(g.dv_kind(), group.server, group.num_kv_heads(), g.end - g.begin);
    }
    place_gradients(a_, heads_, tasks_, home, 0);
  }

  const Layout& layout_;
  const PlanOptions& options_;
  const HeadShape heads_;
  const std::vector<int64_t>& retain_bytes_;
  const int64_t ranks_per_node_;
  const std::span<const Task> tasks_;
  Arrangement a_;
};

}  // namespace

size_t Arrangement::neediest_rank() const {
  size_t neediest = 0;
  for (size_t r = 1; r < arenas[0].size(); ++r)
    if (arena_bytes(r) > arena_bytes(neediest)) neediest = r;
  return neediest;
}

Arrangement arrange(const Layout& layout, const PlanOptions& options, std::span<const Task> tasks) {
  return Arranger(layout, options, tasks).run();
}

}  // namespace distca::plan
