// From tasks to tables: what every rank sends, stores, computes, awaits and adds, and where in its arena.
#include <algorithm>
#include <map>

#include "plan/plan.h"

namespace distca::plan {
namespace {

/// Hands out extents of an arena one after another.
class Carver {
 public:
  explicit Carver(int64_t begin = 0) : begin_(begin), next_(begin) {}

  int64_t take(int64_t bytes) {
    const int64_t offset = next_;
    next_ += (bytes + kExtentAlignment - 1) / kExtentAlignment * kExtentAlignment;
    return offset;
  }
  int64_t bytes() const { return next_ - begin_; }

 private:
  int64_t begin_, next_;
};

/// A group of one document at one server.
struct DocumentServer {
  int64_t server;
  int64_t kv_begin, kv_end;
  size_t group;  // index into the server's groups
};

class Assembler {
 public:
  Assembler(const Layout& layout, const PlanOptions& options, std::vector<RankTables>& tables, PlanStats& stats)
      : layout_(layout),
        heads_(options.schedule.heads),
        block_rows_(options.key_block_rows),
        num_ranks_(static_cast<size_t>(layout.num_ranks())),
        tables_(tables),
        stats_(stats),
        document_servers_(static_cast<size_t>(layout.num_documents())),
        servers_of_(num_ranks_) {
    tables_.assign(num_ranks_, {});
    for (auto& arenas : stats_.arenas) arenas.assign(num_ranks_, {});
  }

  void run(const std::vector<Task>& tasks) {
    for (size_t begin = 0; begin < tasks.size();) {
      size_t end = begin;
      while (end < tasks.size() && tasks[end].server == tasks[begin].server) ++end;
      add_server(std::span(tasks).subspan(begin, end - begin));
      begin = end;
    }
    list_padding();
    for (int64_t d = 0; d < layout_.num_documents(); ++d) split_key_gradients(d);
    for (size_t r = 0; r < num_ranks_; ++r) carve_server_in(r);
    for (size_t r = 0; r < num_ranks_; ++r) carve_scratch(r);
    for (auto& servers : servers_of_) {
      std::sort(servers.begin(), servers.end());
      servers.erase(std::unique(servers.begin(), servers.end()), servers.end());
    }
    for (size_t r = 0; r < num_ranks_; ++r) bring_out_home(r);
    for (size_t r = 0; r < num_ranks_; ++r) bring_gradients_home(r);
    for (size_t r = 0; r < num_ranks_; ++r) finish(r);
  }

 private:
  RowFormat format(Phase p, Direction d, TensorKind k) const { return row_format(heads_, p, d, k); }

  // ---- groups, tasks and block tables of one server ----

  void add_server(std::span<const Task> tasks) {
    struct Draft {
      std::span<const Task> tasks;
      int64_t kv_begin, kv_end;
      bool is_local;
    };
    const int64_t server = tasks.front().server;
    RankTables& t = tables_[static_cast<size_t>(server)];
    std::vector<Draft> drafts;
    for (size_t begin = 0; begin < tasks.size();) {
      // A group's tasks see one unbroken range of keys; with a window, a document may have several at a server.
      const int64_t document = tasks[begin].document;
      Draft draft{{}, tasks[begin].kv_begin, tasks[begin].kv_end, true};
      size_t end = begin;
      while (end < tasks.size() && tasks[end].document == document && tasks[end].kv_begin <= draft.kv_end) {
        draft.kv_end = std::max(draft.kv_end, tasks[end].kv_end);
        draft.is_local = draft.is_local && tasks[end].home == server;
        ++end;
      }
      draft.tasks = tasks.subspan(begin, end - begin);
      draft.is_local = draft.is_local && holds(server, document, draft.kv_begin, draft.kv_end);
      drafts.push_back(draft);
      begin = end;
    }
    std::stable_partition(drafts.begin(), drafts.end(), [](const Draft& d) { return d.is_local; });
    for (const Draft& d : drafts) add_group(t, server, d.tasks, d.kv_begin, d.kv_end, d.is_local);
  }

  /// Whether rows [begin, end) of a document lie in one segment of the rank.
  bool holds(int64_t rank, int64_t document, int64_t begin, int64_t end) const {
    const auto placements = layout_.placements(document);
    return std::any_of(placements.begin(), placements.end(),
                       [&](const Placement& p) { return p.rank == rank && p.begin <= begin && p.end >= end; });
  }

  void add_group(RankTables& t, int64_t server, std::span<const Task> tasks, int64_t kv_begin, int64_t kv_end,
                 bool is_local) {
    const int64_t document = tasks.front().document;
    GroupRow g = {};
    g.document = document;
    g.kv_begin = kv_begin;
    g.kv_end = kv_end;
    g.first_block = kv_begin / block_rows_;
    g.num_blocks = (kv_end + block_rows_ - 1) / block_rows_ - g.first_block;
    g.block_begin = static_cast<int64_t>(t.blocks.size());
    g.task_begin = static_cast<int64_t>(t.tasks.size());
    g.task_end = g.task_begin + static_cast<int64_t>(tasks.size());
    g.forward_k = g.forward_v = g.backward_k = g.backward_v = -1;
    g.is_local = is_local;
    const auto group = static_cast<int64_t>(t.groups.size());
    for (const Task& task : tasks) {
      t.tasks.push_back({group, task.q_begin, task.q_end, task.kv_begin, task.kv_end, task.kv_head_begin,
                         task.kv_head_end, task.home, task.home_row, -1, -1, -1, -1, -1, -1});
      if (task.home != server) servers_of_[static_cast<size_t>(task.home)].push_back(static_cast<size_t>(server));
    }
    const auto placements = layout_.placements(document);
    size_t p = 0;
    for (int64_t b = 0; b < g.num_blocks; ++b) {
      const int64_t start = (g.first_block + b) * block_rows_;
      const int64_t begin = std::max(start, kv_begin), end = std::min(start + block_rows_, kv_end);
      while (placements[p].end <= begin) ++p;
      const Placement& home = placements[p];
      if (home.rank == server && home.end >= end)
        t.blocks.push_back(block_entry(home.row + (start - home.begin), false));
      else
        t.blocks.push_back(block_entry(block_rows_ * g.num_arena_blocks++, true));
    }
    document_servers_[static_cast<size_t>(document)].push_back({server, kv_begin, kv_end, t.groups.size()});
    t.groups.push_back(g);
  }

  void list_padding() {
    for (size_t r = 0; r < num_ranks_; ++r) {
      int64_t row = 0;
      for (const Segment& s : layout_.ranks()[r]) {
        if (s.document == kPadding) tables_[r].padding.push_back({row, s.num_rows()});
        row += s.num_rows();
      }
    }
  }

  // ---- which server contributes to which key gradients ----

  void split_key_gradients(int64_t document) {
    // Between two neighbouring cuts every row has the same servers.
    const auto& servers = document_servers_[static_cast<size_t>(document)];
    std::vector<int64_t> cuts;
    for (const DocumentServer& s : servers) {
      cuts.push_back(s.kv_begin);
      cuts.push_back(s.kv_end);
    }
    std::sort(cuts.begin(), cuts.end());
    for (const Placement& p : layout_.placements(document)) {
      for (int64_t row = p.begin; row < p.end;) {
        const int64_t end = std::min(p.end, *std::upper_bound(cuts.begin(), cuts.end(), row));
        add_key_gradients(document, row, end, p.rank, p.row + (row - p.begin));
        row = end;
      }
    }
  }

  /// Document rows [begin, end), at row `home_row` of `home`, all with the same servers.
  void add_key_gradients(int64_t document, int64_t begin, int64_t end, int64_t home, int64_t home_row) {
    const auto& servers = document_servers_[static_cast<size_t>(document)];
    const auto contributes = [&](const DocumentServer& s) { return s.kv_begin <= begin && end <= s.kv_end; };
    const bool shared = std::count_if(servers.begin(), servers.end(), contributes) > 1;
    for (const DocumentServer& s : servers) {
      if (!contributes(s)) continue;
      GradTarget target = GradTarget::kPartial;
      if (!shared) target = s.server == home ? GradTarget::kReturned : GradTarget::kArena;
      group_grads_[{s.server, s.group}].push_back(
          {{begin, end, static_cast<int64_t>(target), target == GradTarget::kReturned ? home_row : -1, -1, -1},
           home,
           home_row});
      if (s.server != home) servers_of_[static_cast<size_t>(home)].push_back(static_cast<size_t>(s.server));
    }
    if (shared) tables_[static_cast<size_t>(home)].sums.push_back({home_row, end - begin, -1, -1});
  }

  // ---- arenas: rows from other homes ----

  void carve_server_in(size_t server) {
    RankTables& t = tables_[server];
    for (Phase phase : {Phase::kForward, Phase::kBackward}) {
      Carver arena;
      for (GroupRow& g : t.groups) {
        const int64_t rows = g.num_arena_blocks * block_rows_;
        if (rows == 0) continue;
        const int64_t k = arena.take(rows * format(phase, Direction::kIn, TensorKind::kK).row_stride());
        const int64_t v = arena.take(rows * format(phase, Direction::kIn, TensorKind::kV).row_stride());
        (phase == Phase::kForward ? g.forward_k : g.backward_k) = k;
        (phase == Phase::kForward ? g.forward_v : g.backward_v) = v;
        fetch_keys(phase, static_cast<int64_t>(server), g, k, v);
      }
      for (TaskRow& task : t.tasks) {
        if (task.home != static_cast<int64_t>(server)) fetch_queries(phase, static_cast<int64_t>(server), task, arena);
      }
      arena_of(phase, server).server_in = arena.bytes();
    }
  }

  void fetch_keys(Phase phase, int64_t server, const GroupRow& g, int64_t k, int64_t v) {
    const auto placements = layout_.placements(g.document);
    const auto& blocks = tables_[static_cast<size_t>(server)].blocks;
    size_t p = 0;
    int64_t arena_row = 0;
    // Runs of rows that follow one another both at home and in the arena become one put.
    struct Run {
      int64_t home = -1, row = 0, arena_row = 0, num_rows = 0;
    } run;
    const auto flush = [&] {
      if (run.num_rows == 0) return;
      send(phase, Direction::kIn, 0, run.home, server, TensorKind::kK, run.row, -1, run.num_rows,
           k + run.arena_row * format(phase, Direction::kIn, TensorKind::kK).row_stride());
      send(phase, Direction::kIn, 0, run.home, server, TensorKind::kV, run.row, -1, run.num_rows,
           v + run.arena_row * format(phase, Direction::kIn, TensorKind::kV).row_stride());
      run.num_rows = 0;
    };
    for (int64_t b = 0; b < g.num_blocks; ++b) {
      if ((blocks[static_cast<size_t>(g.block_begin + b)] & 1) == 0) continue;
      const int64_t start = (g.first_block + b) * block_rows_, end = std::min(start + block_rows_, g.kv_end);
      for (int64_t row = std::max(start, g.kv_begin); row < end;) {
        while (placements[p].end <= row) ++p;
        const Placement& home = placements[p];
        const int64_t n = std::min(end, home.end) - row;
        const int64_t home_row = home.row + (row - home.begin), target = arena_row + (row - start);
        if (run.num_rows > 0 && run.home == home.rank && run.row + run.num_rows == home_row &&
            run.arena_row + run.num_rows == target) {
          run.num_rows += n;
        } else {
          flush();
          run = {home.rank, home_row, target, n};
        }
        row += n;
      }
      arena_row += block_rows_;
    }
    flush();
  }

  void fetch_queries(Phase phase, int64_t server, TaskRow& t, Carver& arena) {
    const int64_t n = t.q_end - t.q_begin;
    const auto fetch = [&](TensorKind kind) {
      const int64_t offset = arena.take(n * format(phase, Direction::kIn, kind).row_stride());
      send(phase, Direction::kIn, 0, t.home, server, kind, t.home_row, -1, n, offset);
      return offset;
    };
    if (phase == Phase::kForward) {
      t.forward_q = fetch(TensorKind::kQ);
      t.forward_lse = arena.take(n * format(phase, Direction::kIn, TensorKind::kLse).row_stride());
    } else {
      t.backward_q = fetch(TensorKind::kQ);
      t.backward_dout = fetch(TensorKind::kDout);
      t.backward_lse = fetch(TensorKind::kLse);
      t.backward_delta = fetch(TensorKind::kDelta);
    }
  }

  /// Scratch of the key gradients follows server-in: this server's contributions, and the sums of this home.
  void carve_scratch(size_t rank) {
    RankTables& t = tables_[rank];
    Carver scratch(arena_of(Phase::kBackward, rank).server_in);
    const auto take = [&](bool fp32, int64_t rows, int64_t& dk, int64_t& dv) {
      dk = scratch.take(rows * grad_format(fp32, true).row_stride());
      dv = scratch.take(rows * grad_format(fp32, false).row_stride());
    };
    for (SumRow& s : t.sums) {
      take(true, s.num_rows, s.dk, s.dv);
      sum_at_[{rank, s.row}] = {s.dk, s.dv};
    }
    for (size_t g = 0; g < t.groups.size(); ++g) {
      t.groups[g].grad_begin = static_cast<int64_t>(t.grads.size());
      for (GroupGrad& grad : group_grads_[{static_cast<int64_t>(rank), g}]) {
        GradRow& row = grad.row;
        const auto target = static_cast<GradTarget>(row.target);
        if (target == GradTarget::kPartial && grad.home == static_cast<int64_t>(rank)) {
          // The home's own contribution goes straight into the sum and is its first term.
          const auto& sum = sum_at_.at({rank, grad.home_row});
          row.dk = sum.first;
          row.dv = sum.second;
          has_own_term_[{rank, grad.home_row}] = true;
        } else if (target != GradTarget::kReturned) {
          take(target == GradTarget::kPartial, row.end - row.begin, row.dk, row.dv);
        }
        t.grads.push_back(row);
      }
      t.groups[g].grad_end = static_cast<int64_t>(t.grads.size());
    }
    arena_of(Phase::kBackward, rank).scratch = scratch.bytes();
  }

  // ---- rows that come home ----

  /// Every server's message to this home, in one round: each row comes home once.
  void bring_out_home(size_t home) {
    Carver home_in(arena_of(Phase::kForward, home).server_in);
    for (size_t server : servers_of_[home]) {
      for (const TaskRow& t : tables_[server].tasks) {
        if (t.home != static_cast<int64_t>(home)) continue;
        const int64_t n = t.q_end - t.q_begin;
        come_home(Phase::kForward, 0, server, home, TensorKind::kOut, t.forward_q, t.home_row, n, home_in);
        come_home(Phase::kForward, 0, server, home, TensorKind::kLse, t.forward_lse, t.home_row, n, home_in);
      }
    }
    arena_of(Phase::kForward, home).home_in = home_in.bytes();
  }

  /// Gradients come home in rounds: servers in ascending order, as many a round as fit into the largest single message.
  void bring_gradients_home(size_t home) {
    std::vector<int64_t> message_bytes(num_ranks_);
    for (size_t server : servers_of_[home]) {
      Carver size;
      visit_gradients(server, home, [&](TensorKind kind, int64_t, int64_t, int64_t n) {
        size.take(n * format(Phase::kBackward, Direction::kOut, kind).row_stride());
      });
      message_bytes[server] = size.bytes();
    }
    const int64_t round_bytes = *std::max_element(message_bytes.begin(), message_bytes.end());
    const int64_t begin = arena_of(Phase::kBackward, home).server_in + arena_of(Phase::kBackward, home).scratch;
    Carver home_in(begin);
    int64_t round = 0, most = 0;
    for (size_t server : servers_of_[home]) {
      if (home_in.bytes() + message_bytes[server] > round_bytes) {
        ++round;
        home_in = Carver(begin);
      }
      visit_gradients(server, home, [&](TensorKind kind, int64_t source, int64_t row, int64_t n) {
        come_home(Phase::kBackward, round, server, home, kind, source, row, n, home_in);
      });
      most = std::max(most, home_in.bytes());
    }
    tables_[home].num_rounds = round + 1;
    require<CapacityError>(round < kMaxRounds, "plan: rank ", home, " would need ", round + 1,
                           " rounds of gradients; at most ", kMaxRounds, " are allowed");
    arena_of(Phase::kBackward, home).home_in = most;
  }

  /// Calls visit(tensor, offset in the server's arena, row at home, rows) for all that `server` computed for `home`.
  template <class Visit>
  void visit_gradients(size_t server, size_t home, const Visit& visit) {
    const RankTables& t = tables_[server];
    for (const TaskRow& task : t.tasks) {
      if (task.home == static_cast<int64_t>(home))
        visit(TensorKind::kDq, task.backward_dout, task.home_row, task.q_end - task.q_begin);
    }
    for (size_t g = 0; g < t.groups.size(); ++g) {
      const auto& of_group = group_grads_[{static_cast<int64_t>(server), g}];
      for (size_t i = 0; i < of_group.size(); ++i) {
        if (of_group[i].home != static_cast<int64_t>(home)) continue;
        const GradRow& row = t.grads[static_cast<size_t>(t.groups[g].grad_begin) + i];
        const bool partial = static_cast<GradTarget>(row.target) == GradTarget::kPartial;
        const int64_t n = row.end - row.begin;
        visit(partial ? TensorKind::kDkPartial : TensorKind::kDk, row.dk, of_group[i].home_row, n);
        visit(partial ? TensorKind::kDvPartial : TensorKind::kDv, row.dv, of_group[i].home_row, n);
      }
    }
  }

  void come_home(Phase phase, int64_t round, size_t server, size_t home, TensorKind kind, int64_t source, int64_t row,
                 int64_t n, Carver& home_in) {
    const int64_t target = home_in.take(n * format(phase, Direction::kOut, kind).row_stride());
    send(phase, Direction::kOut, round, static_cast<int64_t>(server), static_cast<int64_t>(home), kind, -1, source, n,
         target);
    ReceiveRow r = {round,
                    static_cast<int64_t>(server),
                    static_cast<int64_t>(kind),
                    static_cast<int64_t>(ReceiveAction::kCopy),
                    row,
                    n,
                    target,
                    -1};
    if (kind == TensorKind::kDkPartial || kind == TensorKind::kDvPartial) {
      const auto& sum = sum_at_.at({home, row});
      r.sum = kind == TensorKind::kDkPartial ? sum.first : sum.second;
      // dk and dv of a row run come one after the other; the first pair of a run without the home's own term assigns.
      bool& started = has_own_term_[{home, row}];
      r.action = static_cast<int64_t>(started ? ReceiveAction::kAdd : ReceiveAction::kAssign);
      if (kind == TensorKind::kDvPartial) started = true;
    }
    tables_[home].receives[static_cast<size_t>(phase)].push_back(r);
  }

  // ---- shared ----

  void send(Phase phase, Direction direction, int64_t round, int64_t from, int64_t to, TensorKind kind, int64_t row,
            int64_t source, int64_t num_rows, int64_t target) {
    tables_[static_cast<size_t>(from)].sends[static_cast<size_t>(phase)].push_back(
        {static_cast<int64_t>(direction), round, to, static_cast<int64_t>(kind), row, source, num_rows, target});
    if (from == to) return;
    const auto message = 2 * static_cast<size_t>(phase) + static_cast<size_t>(direction);
    stats_.bytes[message] += num_rows * format(phase, direction, kind).wire_bytes();
    auto& waits = tables_[static_cast<size_t>(to)].waits[static_cast<size_t>(phase)];
    // All rows of a message are sent one after another, so that its first row is enough to remember it.
    const WaitRow wait = {static_cast<int64_t>(direction), round, from};
    const auto same = [&](const WaitRow& w) {
      return w.direction == wait.direction && w.round == wait.round && w.peer == wait.peer;
    };
    if (std::none_of(waits.begin(), waits.end(), same)) waits.push_back(wait);
  }

  void finish(size_t rank) {
    for (auto& sends : tables_[rank].sends) {
      std::stable_sort(sends.begin(), sends.end(), [](const SendRow& a, const SendRow& b) {
        if (a.direction != b.direction) return a.direction < b.direction;
        if (a.round != b.round) return a.round < b.round;
        return a.peer < b.peer;
      });
    }
    for (auto& waits : tables_[rank].waits) {
      std::sort(waits.begin(), waits.end(), [](const WaitRow& a, const WaitRow& b) {
        if (a.direction != b.direction) return a.direction < b.direction;
        if (a.round != b.round) return a.round < b.round;
        return a.peer < b.peer;
      });
    }
  }

  RowFormat grad_format(bool fp32, bool is_dk) const {
    const TensorKind kind =
        fp32 ? (is_dk ? TensorKind::kDkPartial : TensorKind::kDvPartial) : (is_dk ? TensorKind::kDk : TensorKind::kDv);
    return format(Phase::kBackward, Direction::kOut, kind);
  }
  PlanStats::Arena& arena_of(Phase phase, size_t rank) { return stats_.arenas[static_cast<size_t>(phase)][rank]; }

  struct GroupGrad {
    GradRow row;
    int64_t home;
    int64_t home_row;
  };

  const Layout& layout_;
  const HeadShape heads_;
  const int64_t block_rows_;
  const size_t num_ranks_;
  std::vector<RankTables>& tables_;
  PlanStats& stats_;
  std::vector<std::vector<DocumentServer>> document_servers_;
  std::vector<std::vector<size_t>> servers_of_;  // of each home: the other ranks that send rows back to it
  std::map<std::pair<int64_t, size_t>, std::vector<GroupGrad>> group_grads_;  // by (server, group)
  std::map<std::pair<size_t, int64_t>, std::pair<int64_t, int64_t>> sum_at_;  // (home, row) -> dk, dv offsets
  std::map<std::pair<size_t, int64_t>, bool> has_own_term_;                   // of the sum at (home, row)
};

}  // namespace

void assemble(const Layout& layout, const PlanOptions& options, const std::vector<Task>& tasks,
              std::vector<RankTables>& tables, PlanStats& stats) {
  Assembler(layout, options, tables, stats).run(tasks);
}

}  // namespace distca::plan
