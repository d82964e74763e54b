#include "plan/scheduler.h"

#include <algorithm>

#include "plan/balancer.h"
#include "plan/limits.h"

namespace distca::plan {
namespace {

/// Writes tasks that come ascending by (server, document). Within one document at one server head ranges become equal
/// or disjoint, and neighbours are merged.
class TaskWriter {
 public:
  TaskWriter(const Layout& layout, const ScheduleOptions& options)
      : layout_(layout), mask_(options.mask), heads_of_group_(head_groups(options).heads_of_group) {}

  void reserve(size_t n) { tasks_.reserve(n); }

  /// Of a segment, rows and groups of heads.
  void add(const Placement& p, int64_t begin, int64_t end, int64_t group_begin, int64_t group_end, int64_t server) {
    if (run_ < tasks_.size() && (tasks_[run_].document != p.document || tasks_[run_].server != server)) end_run();
    tasks_.push_back({p.document, begin, end, mask_.first_key(begin),
                      mask_.end_key(end - 1, layout_.document_lengths()[static_cast<size_t>(p.document)]),
                      group_begin * heads_of_group_, group_end * heads_of_group_, p.rank, p.row + (begin - p.begin),
                      server});
  }

  std::vector<Task> take() {
    end_run();
    return std::move(tasks_);
  }

 private:
  /// All tasks of one document at one server are there.
  void end_run() {
    if (tasks_.size() > run_ + 1) {
      split_at_common_heads(std::span(tasks_).subspan(run_));
      std::sort(split_.begin(), split_.end(), [](const Task& a, const Task& b) {
        return a.kv_head_begin != b.kv_head_begin ? a.kv_head_begin < b.kv_head_begin : a.q_begin < b.q_begin;
      });
      merge_rows();
      tasks_.resize(run_);
      merge_heads();
    }
    run_ = tasks_.size();
  }

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
  void merge_heads() {
    size_t run = tasks_.size(), run_end = run;  // the tasks of the head range written last
    for (size_t i = 0; i < split_.size();) {
      size_t end = i;
      while (end < split_.size() && split_[end].kv_head_begin == split_[i].kv_head_begin) ++end;
      const bool same =
          run_end > run && tasks_[run].kv_head_end == split_[i].kv_head_begin &&
          std::equal(split_.begin() + static_cast<int64_t>(i), split_.begin() + static_cast<int64_t>(end),
                     tasks_.begin() + static_cast<int64_t>(run), tasks_.end(), [](const Task& a, const Task& b) {
                       return a.q_begin == b.q_begin && a.q_end == b.q_end && a.home_row == b.home_row;
                     });
      if (same) {
        for (size_t k = run; k < run_end; ++k) tasks_[k].kv_head_end = split_[i].kv_head_end;
      } else {
        run = run_end;
        tasks_.insert(tasks_.end(), split_.begin() + static_cast<int64_t>(i),
                      split_.begin() + static_cast<int64_t>(end));
        run_end = tasks_.size();
      }
      i = end;
    }
  }

  const Layout& layout_;
  const Mask& mask_;
  int64_t heads_of_group_;
  std::vector<Task> tasks_;
  size_t run_ = 0;  // where the tasks of the last document and server begin
  std::vector<int64_t> cuts_;
  std::vector<Task> split_;
};

}  // namespace

std::vector<Task> schedule(const Layout& layout, const ScheduleOptions& options, const Allowances& allowances) {
  Balancer balancer(layout, options, allowances);
  if (options.balance) balancer.run();
  const auto placements = layout.placements();
  const auto placement_of = [&](const Piece& p) { return placements[static_cast<size_t>(p.placement)]; };
  std::vector<Piece> pieces;
  for (const Piece& p : balancer.pieces())
    if (!p.empty() && balancer.is_cut(static_cast<size_t>(p.placement))) pieces.push_back(p);
  // Placements ascend by document.
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.server != b.server ? a.server < b.server : a.placement < b.placement;
  });
  TaskWriter writer(layout, options);
  writer.reserve(placements.size() + 4 * pieces.size());  // tasks may be cut by heads later
  const int64_t num_groups = head_groups(options).num_groups;
  auto piece = pieces.begin();
  const auto add_pieces = [&](int32_t server, int32_t end) {
    for (; piece != pieces.end() && piece->server == server && piece->placement < end; ++piece)
      writer.add(placement_of(*piece), piece->begin, piece->end, piece->head_begin, piece->head_end, server);
  };
  for (int32_t r = 0; r < layout.num_ranks(); ++r) {
    for (int32_t i : balancer.placements_of(static_cast<size_t>(r))) {
      if (balancer.is_cut(static_cast<size_t>(i))) continue;
      add_pieces(r, i);
      const Placement& p = placements[static_cast<size_t>(i)];
      writer.add(p, p.begin, p.end, 0, num_groups, r);
    }
    add_pieces(r, static_cast<int32_t>(placements.size()));
  }
  return writer.take();
}

}  // namespace distca::plan
