#include "plan/task_list.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "plan/scheduler.h"

namespace distca::plan {
namespace {

bool in_plan_order(const Task& a, const Task& b) {
  return std::tie(a.server, a.document, a.kv_head_begin, a.q_begin) <
         std::tie(b.server, b.document, b.kv_head_begin, b.q_begin);
}

void check_given(const Layout& layout, const PlanOptions& options, const GivenTask& t, size_t index) {
  require(t.document >= 0 && t.document < layout.num_documents(), "plan: tasks[", index, "] is of document ",
          t.document, "; 0 to ", layout.num_documents() - 1, " are allowed");
  const int64_t first = layout.first_row(t.document);
  const int64_t length = layout.document_lengths()[static_cast<size_t>(t.document)];
  require(t.q_begin >= 0 && t.q_begin < t.q_end && t.q_end <= length, "plan: tasks[", index, "] has rows [", t.q_begin,
          ", ", t.q_end, ") of document ", t.document, ", which has ", length);
  require(t.q_begin >= first, "plan: tasks[", index, "] has rows [", t.q_begin, ", ", t.q_end, ") of document ",
          t.document, ", whose own rows begin at ", first);
  require(t.kv_head_begin >= 0 && t.kv_head_begin < t.kv_head_end && t.kv_head_end <= options.heads.kv_heads,
          "plan: tasks[", index, "] has key/value heads [", t.kv_head_begin, ", ", t.kv_head_end, ") of ",
          options.heads.kv_heads);
  const auto& servers = options.servers;
  require(t.server >= 0 && t.server < layout.num_ranks() &&
              (servers.empty() || std::binary_search(servers.begin(), servers.end(), t.server)),
          "plan: tasks[", index, "] is on rank ", t.server, ", which does not serve");
}

/// Appends the task to `pieces`, cut at `cuts`.
void cut_at(std::span<const int64_t> cuts, const Task& task, std::vector<Task>& pieces) {
  Task piece = task;
  for (int64_t head : cuts) {
    if (head <= piece.kv_head_begin || head >= task.kv_head_end) continue;
    piece.kv_head_end = head;
    pieces.push_back(piece);
    piece.kv_head_begin = head;
  }
  piece.kv_head_end = task.kv_head_end;
  pieces.push_back(piece);
}

/// How many tasks the cuts add.
size_t num_cuts(const Layout& layout, std::span<const std::vector<int64_t>> cuts, std::span<const int32_t> cuts_of,
                std::span<const Task> tasks) {
  size_t n = 0;
  for (const Task& t : tasks) {
    const int32_t index = cuts_of[static_cast<size_t>(layout.cluster(t.document))];
    if (index < 0) continue;
    for (int64_t head : cuts[static_cast<size_t>(index)]) n += t.kv_head_begin < head && head < t.kv_head_end;
  }
  return n;
}

/// Cuts tasks by heads until those of documents that share rows have equal or disjoint head ranges. Tasks come and stay
/// sorted by (server, document, kv_head_begin, q_begin).
std::vector<Task> with_equal_head_ranges(const Layout& layout, std::vector<Task> tasks) {
  int64_t most_heads = 0;
  for (const Task& t : tasks) most_heads = std::max(most_heads, t.kv_head_end);
  // The heads where ranges begin and end, for clusters that have several ranges.
  std::vector<int32_t> cuts_of(static_cast<size_t>(layout.num_documents()), -1);
  std::vector<std::vector<int64_t>> cuts;
  for (const Task& t : tasks) {
    if (t.kv_head_begin == 0 && t.kv_head_end == most_heads) continue;
    int32_t& index = cuts_of[static_cast<size_t>(layout.cluster(t.document))];
    if (index < 0) {
      index = static_cast<int32_t>(cuts.size());
      cuts.emplace_back();
    }
    cuts[static_cast<size_t>(index)].push_back(t.kv_head_begin);
    cuts[static_cast<size_t>(index)].push_back(t.kv_head_end);
  }
  if (cuts.empty()) return tasks;
  for (auto& of_cluster : cuts) {
    std::sort(of_cluster.begin(), of_cluster.end());
    of_cluster.erase(std::unique(of_cluster.begin(), of_cluster.end()), of_cluster.end());
  }
  // Tasks are cut from the last one to the first, into the same memory, because nearly all stay as they are.
  size_t begin = tasks.size(), write = begin + num_cuts(layout, cuts, cuts_of, tasks);
  tasks.resize(write);
  std::vector<Task> pieces;
  while (begin < write) {  // when they are equal, nothing is left to cut
    const size_t end = begin;
    const Task last = tasks[--begin];
    const int32_t index = cuts_of[static_cast<size_t>(layout.cluster(last.document))];
    if (index < 0) {
      tasks[--write] = last;
      continue;
    }
    while (begin > 0 && tasks[begin - 1].server == last.server && tasks[begin - 1].document == last.document) --begin;
    pieces.clear();
    for (size_t i = begin; i < end; ++i) cut_at(cuts[static_cast<size_t>(index)], tasks[i], pieces);
    std::sort(pieces.begin(), pieces.end(), in_plan_order);
    write -= pieces.size();
    std::copy(pieces.begin(), pieces.end(), tasks.begin() + static_cast<int64_t>(write));
  }
  return tasks;
}

/// Throws unless the tasks compute everything exactly once. Their head ranges are equal or disjoint.
void check_complete(const Layout& layout, const HeadShape& heads, std::vector<Task> tasks) {
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::tie(a.document, a.kv_head_begin, a.q_begin) < std::tie(b.document, b.kv_head_begin, b.q_begin);
  });
  const auto first_row = [&](int64_t d) { return d < layout.num_documents() ? layout.first_row(d) : 0; };
  int64_t document = 0, head = 0, head_end = 0, row = first_row(0);
  const auto fail = [](const std::tuple<int64_t, int64_t, int64_t>& at) {
    const auto& [of_document, of_head, of_row] = at;
    throw InvalidArgumentError(message("plan: the tasks do not compute row ", of_row, " of document ", of_document,
                                       ", key/value head ", of_head, ", exactly once"));
  };
  const auto skip_finished = [&] {
    if (document < layout.num_documents() && row == layout.document_lengths()[static_cast<size_t>(document)]) {
      head = head_end;
      if (head == heads.kv_heads) {
        head = 0;
        ++document;
      }
      row = first_row(document);
    }
  };
  for (const Task& t : tasks) {
    if (row == first_row(document)) head_end = t.kv_head_end;
    const auto expected = std::tuple(document, head, row), found = std::tuple(t.document, t.kv_head_begin, t.q_begin);
    if (found != expected) fail(std::min(found, expected));
    row = t.q_end;
    skip_finished();
  }
  if (document != layout.num_documents()) fail({document, head, row});
}

}  // namespace

void TaskWriter::add(const Placement& p, int64_t begin, int64_t end, int64_t group_begin, int64_t group_end,
                     int64_t server) {
  if (run_ < tasks_.size() && (tasks_[run_].document != p.document || tasks_[run_].server != server)) end_run();
  const auto [length, mask] = options_.document(layout_, p.document);
  tasks_.push_back({p.document, begin, end, mask.first_key(begin), mask.end_key(end - 1, length),
                    group_begin * heads_of_group_, group_end * heads_of_group_, p.rank, p.row + (begin - p.begin),
                    server});
}

std::vector<Task> TaskWriter::take() {
  end_run();
  return with_equal_head_ranges(layout_, std::move(tasks_));
}

/// Finishes the tasks of one document at one server, which are all there now.
void TaskWriter::end_run() {
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

void TaskWriter::split_at_common_heads(std::span<const Task> tasks) {
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

void TaskWriter::merge_rows() {
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

/// Makes neighbouring head ranges with the same rows one range.
void TaskWriter::merge_heads() {
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
      tasks_.insert(tasks_.end(), split_.begin() + static_cast<int64_t>(i), split_.begin() + static_cast<int64_t>(end));
      run_end = tasks_.size();
    }
    i = end;
  }
}

std::vector<Task> task_list(const Layout& layout, const PlanOptions& options, std::span<const GivenTask> given) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < given.size(); ++i) {
    const GivenTask& t = given[i];
    check_given(layout, options, t, i);
    const auto [length, mask] = options.document(layout, t.document);
    for (const Placement& p : layout.placements(t.document)) {
      const int64_t begin = std::max(p.begin, t.q_begin), end = std::min(p.end, t.q_end);
      if (begin >= end) continue;
      tasks.push_back({t.document, begin, end, mask.first_key(begin), mask.end_key(end - 1, length), t.kv_head_begin,
                       t.kv_head_end, p.rank, p.row + (begin - p.begin), t.server});
    }
  }
  std::sort(tasks.begin(), tasks.end(), in_plan_order);
  tasks = with_equal_head_ranges(layout, std::move(tasks));
  check_complete(layout, options.heads, tasks);
  return tasks;
}

}  // namespace distca::plan
