#include "torch/local_tasks.h"

#include <algorithm>

namespace distca::ops {

void read_tasks(std::vector<LocalTask>& sorted, const Tensor& tasks, int64_t q_rows, int64_t kv_rows) {
  require(tasks.dim() == 2 && tasks.size(1) == 4, "tasks has shape ", shape_of(tasks),
          "; [N, 4] (q_begin, q_end, kv_begin, kv_end) is expected");
  const auto words = words_of(tasks, "tasks");
  sorted.clear();
  for (size_t i = 0; i < words.size(); i += 4) {
    const LocalTask t{words[i], words[i + 1], words[i + 2], words[i + 3]};
    require(t.q_begin >= 0 && t.q_end > t.q_begin && t.q_end <= q_rows, "task ", i / 4, ": query rows [", t.q_begin,
            ", ", t.q_end, ") of ", q_rows);
    require(t.kv_begin >= 0 && t.kv_end > t.kv_begin && t.kv_end <= kv_rows, "task ", i / 4, ": key rows [", t.kv_begin,
            ", ", t.kv_end, ") of ", kv_rows);
    require(t.first_row() >= 0, "task ", i / 4, " has more query rows (", t.q_rows(), ") than key rows (", t.kv_rows(),
            ")");
    sorted.push_back(t);
  }
  std::sort(sorted.begin(), sorted.end(), [](const LocalTask& a, const LocalTask& b) { return a.q_begin < b.q_begin; });
  for (size_t i = 1; i < sorted.size(); ++i)
    require(sorted[i - 1].q_end <= sorted[i].q_begin, "two tasks have query row ", sorted[i].q_begin);
  std::sort(sorted.begin(), sorted.end(), [](const LocalTask& a, const LocalTask& b) {
    return a.kv_begin != b.kv_begin ? a.kv_begin < b.kv_begin : a.kv_end < b.kv_end;
  });
  for (size_t i = 1; i < sorted.size(); ++i) {
    const LocalTask &a = sorted[i - 1], &b = sorted[i];
    if (a.kv_begin == b.kv_begin)
      require(b.first_row() >= a.kv_rows(), "two tasks compute row ", b.first_row(), " of the document at key row ",
              b.kv_begin);
    else
      require(b.kv_begin >= a.kv_end, "the documents at key rows ", b.kv_begin, " and before ", a.kv_end, " overlap");
  }
}

}  // namespace distca::ops
