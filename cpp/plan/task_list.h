// CA-tasks, and lists of them in the order and form that a plan has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/layout.h"
#include "plan/options.h"

namespace distca::plan {

/// A CA-task: query rows [q_begin, q_end) of a document, all with one home, which one server computes in one go.
struct Task {
  int64_t document = 0;
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_begin = 0, kv_end = 0;            // document rows of the keys that these queries see
  int64_t kv_head_begin = 0, kv_head_end = 0;  // key/value heads, with the query heads that share them
  int64_t home = 0;                            // rank that holds the rows
  int64_t home_row = 0;                        // row of q_begin in the home's token tensor
  int64_t server = 0;                          // rank that computes them

  int64_t num_rows() const { return q_end - q_begin; }
};

/// Makes the tasks of a schedule from its pieces. Pieces come in ascending order of (server, document). Among the tasks
/// of one document at one server, head ranges become equal or disjoint, and neighbours are merged.
class TaskWriter {
 public:
  TaskWriter(const Layout& layout, const PlanOptions& options, int64_t heads_of_group)
      : layout_(layout), options_(options), heads_of_group_(heads_of_group) {}

  void reserve(size_t n) { tasks_.reserve(n); }
  /// Adds rows [begin, end) and groups of heads [group_begin, group_end) of a segment.
  void add(const Placement& p, int64_t begin, int64_t end, int64_t group_begin, int64_t group_end, int64_t server);
  /// All tasks, sorted by (server, document, kv_head_begin, q_begin). Those of one document, at whatever servers, have
  /// equal or disjoint head ranges: to everything that follows, each range is a document of its own.
  std::vector<Task> take();

 private:
  void end_run();
  void split_at_common_heads(std::span<const Task> tasks);
  void merge_rows();
  void merge_heads();

  const Layout& layout_;
  const PlanOptions& options_;
  int64_t heads_of_group_;
  std::vector<Task> tasks_;
  size_t run_ = 0;  // first task of the last document and server
  std::vector<int64_t> cuts_;
  std::vector<Task> split_;
};

/// A task as a caller gives it: rows [q_begin, q_end) of a document and key/value heads [kv_head_begin, kv_head_end),
/// computed by `server`.
struct GivenTask {
  int64_t document = 0;
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_head_begin = 0, kv_head_end = 0;
  int64_t server = 0;
};

/// The given tasks in the form of a plan, cut where their rows have several homes. Throws InvalidArgumentError unless
/// they compute every row and head of the layout exactly once, on ranks that serve.
std::vector<Task> task_list(const Layout& layout, const PlanOptions& options, std::span<const GivenTask> given);

}  // namespace distca::plan
