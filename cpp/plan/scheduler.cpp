#include "plan/scheduler.h"

#include <algorithm>

#include "plan/balancer.h"

namespace distca::plan {
namespace {

/// Turns pieces into tasks: sorted, with equal or disjoint head ranges in a document at a server, neighbours merged.
class TaskWriter {
 public:
  TaskWriter(const Layout& layout, const ScheduleOptions& options)
      : layout_(layout), mask_(options.mask), heads_(options.split_heads ? 1 : options.heads.kv_heads) {}

  Task task(const Placement& p, int64_t begin, int64_t end, int64_t head_begin, int64_t head_end,
            int64_t server) const {
    return {p.document,
            begin,
            end,
            mask_.first_key(begin),
            mask_.end_key(end - 1, layout_.document_lengths()[static_cast<size_t>(p.document)]),
            head_begin * heads_,
            head_end * heads_,
            p.rank,
            p.row + (begin - p.begin),
            server};
  }

  /// All tasks of one document at one server.
  void write(std::span<Task> tasks, std::vector<Task>& out) {
    if (tasks.size() == 1) {
      out.push_back(tasks[0]);
      return;
    }
    split_at_common_heads(tasks);
    std::sort(split_.begin(), split_.end(), [](const Task& a, const Task& b) {
      return a.kv_head_begin != b.kv_head_begin ? a.kv_head_begin < b.kv_head_begin : a.q_begin < b.q_begin;
    });
    merge_rows();
    merge_heads(out);
  }

 private:
  void split_at_common_heads(std::span<const Task> tasks) {
    cuts_.clear();
    for (const Task& t : tasks) {
      cuts_.push_back(t.kv_head_begin);
      cuts_.push_back(t.kv_head_end);
    }
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    split_.clear();
    for (const Task& t : tasks) {
      for (auto cut = std::lower_bound(cuts_.begin(), cuts_.end(), t.kv_head_begin); *cut < t.kv_head_end; ++cut) {
        split_.push_back(t);
        split_.back().kv_head_begin = cut[0];
        split_.back().kv_head_end = cut[1];
      }
    }
  }

  void merge_rows() {
    size_t last = 0;
    for (size_t i = 1; i < split_.size(); ++i) {
      Task& a = split_[last];
      const Task& b = split_[i];
      if (a.kv_head_begin == b.kv_head_begin && a.home == b.home && a.q_end == b.q_begin &&
          a.home_row + a.num_rows() == b.home_row) {
        a.q_end = b.q_end;
        a.kv_end = b.kv_end;
      } else {
        split_[++last] = b;
      }
    }
    split_.resize(last + 1);
  }

  /// Neighbouring head ranges with the same rows become one.
  void merge_heads(std::vector<Task>& out) const {
    size_t run = out.size(), run_end = run;  // the tasks of the head range written last
    for (size_t i = 0; i < split_.size();) {
      size_t end = i;
      while (end < split_.size() && split_[end].kv_head_begin == split_[i].kv_head_begin) ++end;
      const bool same =
          run_end > run && out[run].kv_head_end == split_[i].kv_head_begin &&
          std::equal(split_.begin() + static_cast<int64_t>(i), split_.begin() + static_cast<int64_t>(end),
                     out.begin() + static_cast<int64_t>(run), out.end(), [](const Task& a, const Task& b) {
                       return a.q_begin == b.q_begin && a.q_end == b.q_end && a.home_row == b.home_row;
                     });
      if (same) {
        for (size_t k = run; k < run_end; ++k) out[k].kv_head_end = split_[i].kv_head_end;
      } else {
        run = run_end;
        out.insert(out.end(), split_.begin() + static_cast<int64_t>(i), split_.begin() + static_cast<int64_t>(end));
        run_end = out.size();
      }
      i = end;
    }
  }

  const Layout& layout_;
  const Mask& mask_;
  int64_t heads_;
  std::vector<int64_t> cuts_;
  std::vector<Task> split_;
};

}  // namespace

std::vector<Task> schedule(const Layout& layout, const ScheduleOptions& options) {
  Balancer balancer(layout, options);
  if (options.balance) balancer.run();
  TaskWriter writer(layout, options);
  const int64_t num_heads = options.split_heads ? options.heads.kv_heads : 1;
  std::vector<Task> cut, merged, tasks;
  for (const Piece& p : balancer.pieces()) {
    if (!p.empty())
      cut.push_back(writer.task(layout.placements()[static_cast<size_t>(p.placement)], p.begin, p.end, p.head_begin,
                                p.head_end, p.server));
  }
  const auto before = [](const Task& a, const Task& b) {
    if (a.server != b.server) return a.server < b.server;
    if (a.document != b.document) return a.document < b.document;
    return a.q_begin < b.q_begin;
  };
  std::sort(cut.begin(), cut.end(), before);
  tasks.reserve(layout.placements().size() + 2 * cut.size());
  size_t next = 0;
  for (size_t r = 0; r < static_cast<size_t>(layout.num_ranks()); ++r) {
    // Whole segments at home and pieces, both ascending by document.
    merged.clear();
    for (int32_t i : balancer.placements_of(r)) {
      if (balancer.has_pieces(static_cast<size_t>(i))) continue;
      const Placement& p = layout.placements()[static_cast<size_t>(i)];
      while (next < cut.size() && cut[next].server == p.rank && cut[next].document <= p.document)
        merged.push_back(cut[next++]);
      merged.push_back(writer.task(p, p.begin, p.end, 0, num_heads, p.rank));
    }
    while (next < cut.size() && cut[next].server == static_cast<int64_t>(r)) merged.push_back(cut[next++]);
    for (size_t i = 0; i < merged.size();) {
      size_t end = i + 1;
      while (end < merged.size() && merged[end].document == merged[i].document) ++end;
      writer.write(std::span(merged).subspan(i, end - i), tasks);
      i = end;
    }
  }
  return tasks;
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
