#include "plan/scheduler.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace distca::plan {
namespace {

using Wide = __int128;

/// A way to lighten a server: rows [begin, end) of one of its tasks go to `server`.
struct Move {
  size_t task = 0;
  int64_t begin = 0, end = 0;
  int64_t server = 0;
  int64_t cost = 0;
  int64_t bytes = 0;

  /// More load for each byte first; then more load; then the lower task, server and row, so that the order is total.
  bool better_than(const Move& other) const {
    const Wide a = Wide{cost} * other.bytes, b = Wide{other.cost} * bytes;
    if (a != b) return a > b;
    if (cost != other.cost) return cost > other.cost;
    if (task != other.task) return task < other.task;
    if (server != other.server) return server < other.server;
    return begin < other.begin;
  }
};

class Greedy {
 public:
  Greedy(const Layout& layout, const ScheduleOptions& options)
      : layout_(layout),
        options_(options),
        is_server_(static_cast<size_t>(layout.num_ranks()), options.servers.empty()),
        load_(is_server_.size()),
        tasks_of_(is_server_.size()) {
    for (int64_t server : options.servers) is_server_[static_cast<size_t>(server)] = true;
    num_servers_ = std::count(is_server_.begin(), is_server_.end(), true);
    const HeadShape& h = options.heads;
    // What a moved query row and a fetched key row cost over forward and backward together (see tables.h).
    const int64_t e = h.element_bytes();
    query_row_bytes_ = h.q_heads * (3 * e * h.dim + 2 * e * h.v_dim + 12);
    key_row_bytes_ = h.kv_heads * (h.dim + h.v_dim) * (2 * e + 4);
    for (const Placement& p : layout.placements()) {
      add_task(with_keys({p.document, p.begin, p.end, 0, 0, 0, h.kv_heads, p.rank, p.row, p.rank}));
    }
    total_ = std::accumulate(load_.begin(), load_.end(), int64_t{0});
    // Servers aim at the mean; the stop rule is the tolerance.
    mean_ = total_ / num_servers_;
  }

  void run() {
    const size_t most_moves = 64 * load_.size() + 4 * tasks_.size();
    for (size_t i = 0; i < most_moves; ++i) {
      const size_t from = heaviest();
      if (is_server_[from] ? within_tolerance(load_[from]) : tasks_of_[from].empty()) return;
      std::optional<Move> move = best_move(from, options_.min_rows);
      if (!move) move = best_move(from, 1);
      if (!move) break;
      apply(*move);
    }
    // What could not be placed within the mean goes to whoever has least.
    for (size_t r = 0; r < load_.size(); ++r) {
      while (!is_server_[r] && !tasks_of_[r].empty()) {
        const size_t i = tasks_of_[r].back();
        const Task& t = tasks_[i];
        apply({i, t.q_begin, t.q_end, static_cast<int64_t>(lightest_server()), cost(t, t.q_begin, t.q_end), 0});
      }
    }
  }

  std::vector<Task> take() {
    std::sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
      if (a.server != b.server) return a.server < b.server;
      if (a.document != b.document) return a.document < b.document;
      return a.q_begin < b.q_begin;
    });
    std::vector<Task> merged;
    for (const Task& t : tasks_) {
      if (!merged.empty()) {
        Task& last = merged.back();
        if (last.server == t.server && last.document == t.document && last.home == t.home && last.q_end == t.q_begin &&
            last.home_row + last.num_rows() == t.home_row) {
          last.q_end = t.q_end;
          last.kv_end = t.kv_end;
          continue;
        }
      }
      merged.push_back(t);
    }
    return merged;
  }

 private:
  int64_t length_of(const Task& t) const { return layout_.document_lengths()[static_cast<size_t>(t.document)]; }
  /// Of the task's rows [begin, end).
  int64_t cost(const Task& t, int64_t begin, int64_t end) const {
    return options_.cost.cost(options_.mask, length_of(t), begin, end);
  }

  /// Fills in which keys the task's queries see.
  Task with_keys(Task t) const {
    t.kv_begin = options_.mask.first_key(t.q_begin);
    t.kv_end = options_.mask.end_key(t.q_end - 1, length_of(t));
    return t;
  }

  /// A rank that does not serve but still has tasks comes before any server.
  size_t heaviest() const {
    size_t found = 0;
    for (size_t r = 1; r < load_.size(); ++r) {
      const bool homeless = !is_server_[r] && load_[r] > 0, found_homeless = !is_server_[found] && load_[found] > 0;
      if (homeless != found_homeless ? homeless : load_[r] > load_[found]) found = r;
    }
    return found;
  }
  size_t lightest_server() const {
    size_t found = load_.size();
    for (size_t r = 0; r < load_.size(); ++r)
      if (is_server_[r] && (found == load_.size() || load_[r] < load_[found])) found = r;
    return found;
  }

  bool within_tolerance(int64_t load) const {
    return Wide{load} * num_servers_ * 1'000'000 <= Wide{total_} * (1'000'000 + options_.tolerance_ppm);
  }

  void add_task(const Task& t) {
    tasks_of_[static_cast<size_t>(t.server)].push_back(tasks_.size());
    load_[static_cast<size_t>(t.server)] += cost(t, t.q_begin, t.q_end);
    tasks_.push_back(t);
  }

  /// Key rows of a task that the server neither holds as home nor fetches for its other tasks.
  int64_t missing_key_rows(const Task& wanted, int64_t server) {
    // What the server has, as intervals in ascending order, and the gaps between them.
    intervals_.clear();
    for (size_t i : tasks_of_[static_cast<size_t>(server)]) {
      if (tasks_[i].document == wanted.document) intervals_.push_back({tasks_[i].kv_begin, tasks_[i].kv_end});
    }
    for (const Placement& p : layout_.placements(wanted.document)) {
      if (p.rank == server) intervals_.push_back({p.begin, p.end});
    }
    std::sort(intervals_.begin(), intervals_.end());
    int64_t missing = 0, next = wanted.kv_begin;
    for (const auto& [begin, end] : intervals_) {
      missing += std::max<int64_t>(0, std::min(begin, wanted.kv_end) - next);
      next = std::max(next, end);
    }
    return missing + std::max<int64_t>(0, wanted.kv_end - next);
  }

  int64_t move_bytes(Task t, int64_t begin, int64_t end, int64_t server) {
    t.q_begin = begin;
    t.q_end = end;
    const int64_t query_rows = t.home == server ? 0 : end - begin;
    return query_rows * query_row_bytes_ + missing_key_rows(with_keys(t), server) * key_row_bytes_ + 1;
  }

  /// The most rows at the task's begin, or at its end, that cost at most `budget`.
  int64_t prefix_end(const Task& t, int64_t budget) const {
    int64_t low = t.q_begin, high = t.q_end;
    while (low < high) {
      const int64_t mid = low + (high - low + 1) / 2;
      if (cost(t, t.q_begin, mid) <= budget)
        low = mid;
      else
        high = mid - 1;
    }
    return low;
  }
  int64_t suffix_begin(const Task& t, int64_t budget) const {
    int64_t low = t.q_begin, high = t.q_end;
    while (low < high) {
      const int64_t mid = low + (high - low) / 2;
      if (cost(t, mid, t.q_end) <= budget)
        high = mid;
      else
        low = mid + 1;
    }
    return low;
  }

  std::optional<Move> best_move(size_t from, int64_t min_rows) {
    std::optional<Move> best;
    const int64_t surplus = is_server_[from] ? load_[from] - mean_ : load_[from];
    const auto offer = [&](size_t i, int64_t begin, int64_t end, size_t to) {
      const Task& t = tasks_[i];
      const bool whole = begin == t.q_begin && end == t.q_end;
      const int64_t rest = t.num_rows() - (end - begin);
      if (end <= begin || (!whole && (end - begin < min_rows || rest < min_rows))) return;
      const int64_t moved = cost(t, begin, end);
      // Between servers the larger load must fall.
      if (moved == 0 || (is_server_[from] && load_[to] + moved >= load_[from])) return;
      const Move move{
          i, begin, end, static_cast<int64_t>(to), moved, move_bytes(t, begin, end, static_cast<int64_t>(to))};
      if (!best || move.better_than(*best)) best = move;
    };
    for (size_t to = 0; to < load_.size(); ++to) {
      if (!is_server_[to] || load_[to] >= mean_) continue;
      const int64_t budget = std::min(surplus, mean_ - load_[to]);
      for (size_t i : tasks_of_[from]) {
        const Task& t = tasks_[i];
        if (cost(t, t.q_begin, t.q_end) <= budget) {
          offer(i, t.q_begin, t.q_end, to);
          continue;
        }
        offer(i, t.q_begin, prefix_end(t, budget), to);
        offer(i, suffix_begin(t, budget), t.q_end, to);
        if (min_rows == 1) {  // a last resort: a single row may overshoot the mean and still pay
          offer(i, t.q_begin, t.q_begin + 1, to);
          offer(i, t.q_end - 1, t.q_end, to);
        }
      }
    }
    return best;
  }

  void apply(const Move& m) {
    const Task t = tasks_[m.task];
    auto& list = tasks_of_[static_cast<size_t>(t.server)];
    list.erase(std::find(list.begin(), list.end(), m.task));
    load_[static_cast<size_t>(t.server)] -= cost(t, t.q_begin, t.q_end);
    const auto piece = [&](int64_t begin, int64_t end, int64_t server) {
      Task p = t;
      p.q_begin = begin;
      p.q_end = end;
      p.home_row = t.home_row + (begin - t.q_begin);
      p.server = server;
      return with_keys(p);
    };
    tasks_[m.task] = piece(m.begin, m.end, m.server);  // the moved piece takes the old one's place
    tasks_of_[static_cast<size_t>(m.server)].push_back(m.task);
    load_[static_cast<size_t>(m.server)] += m.cost;
    if (t.q_begin < m.begin) add_task(piece(t.q_begin, m.begin, t.server));
    if (m.end < t.q_end) add_task(piece(m.end, t.q_end, t.server));
  }

  const Layout& layout_;
  const ScheduleOptions& options_;
  std::vector<bool> is_server_;
  int64_t num_servers_ = 0;
  std::vector<int64_t> load_;
  std::vector<std::vector<size_t>> tasks_of_;
  std::vector<Task> tasks_;
  int64_t total_ = 0, mean_ = 0;
  int64_t query_row_bytes_ = 0, key_row_bytes_ = 0;
  std::vector<std::pair<int64_t, int64_t>> intervals_;  // scratch
};

}  // namespace

std::vector<Task> schedule(const Layout& layout, const ScheduleOptions& options) {
  Greedy greedy(layout, options);
  if (options.balance) greedy.run();
  return greedy.take();
}

int64_t load_lower_bound(const Layout& layout, const Mask& mask, const CostModel& cost, int64_t num_servers) {
  int64_t total = 0, costliest_row = 0;
  for (int64_t length : layout.document_lengths()) {
    total += cost.cost(mask, length, 0, length);
    costliest_row = std::max(costliest_row, cost.cost(mask, length, length - 1, length));
  }
  return std::max(costliest_row, (total + num_servers - 1) / num_servers);
}

}  // namespace distca::plan
