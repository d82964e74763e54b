#include "torch/local_tasks.h"

#include <algorithm>
#include <limits>
#include <string_view>

namespace distca::ops {
namespace {

Mask mask_of(std::string_view kind, std::optional<int64_t> window) {
  require(kind == "causal" || kind == "full", "mask = \"", kind, "\"; \"causal\" and \"full\" are allowed");
  require(!window || *window >= 1, "window = ", window.value_or(0),
          "; a positive number of keys, or none, is expected");
  // No document has more rows, so a wider window hides nothing; kernels and ATen count in 32 bits.
  const bool hides = window && *window <= std::numeric_limits<int32_t>::max();
  return {kind == "full" ? MaskKind::kFull : MaskKind::kCausal, hides ? *window : 0};
}

/// Gives the queries of each document's tasks rows of it from 0 on, because where all keys are seen any rows will do.
void place_rows(std::vector<LocalTask>& sorted) {
  for (size_t i = 0; i < sorted.size(); ++i) {
    LocalTask& t = sorted[i];
    t.first_row = 0;
    if (i == 0 || sorted[i - 1].kv_begin != t.kv_begin) continue;
    const LocalTask& before = sorted[i - 1];
    require(before.kv_end == t.kv_end,
            "with the full mask tasks of one document have the same keys; those from key row ", t.kv_begin,
            " on end at ", before.kv_end, " and at ", t.kv_end);
    t.first_row = before.first_row + before.q_rows();
  }
}

}  // namespace

LocalOptions local_options(std::optional<double> scale, double softcap, bool deterministic, StringHandle mask,
                           std::optional<int64_t> window) {
  const Text kind(mask);
  return guarded([&] { return LocalOptions{mask_of(kind, window), scale, softcap, deterministic}; });
}

void read_tasks(std::vector<LocalTask>& sorted, const Tensor& tasks, int64_t q_rows, int64_t kv_rows,
                const Mask& mask) {
  const bool all_keys = mask == Mask{MaskKind::kFull};
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
    require(all_keys || t.q_rows() <= t.kv_rows(), "task ", i / 4, " has more query rows (", t.q_rows(),
            ") than key rows (", t.kv_rows(), ")");
    sorted.push_back(t);
    sorted.back().first_row = t.kv_rows() - t.q_rows();
  }
  std::sort(sorted.begin(), sorted.end(), [](const LocalTask& a, const LocalTask& b) { return a.q_begin < b.q_begin; });
  for (size_t i = 1; i < sorted.size(); ++i)
    require(sorted[i - 1].q_end <= sorted[i].q_begin, "two tasks have query row ", sorted[i].q_begin);
  std::sort(sorted.begin(), sorted.end(), [](const LocalTask& a, const LocalTask& b) {
    if (a.kv_begin != b.kv_begin) return a.kv_begin < b.kv_begin;
    return a.kv_end != b.kv_end ? a.kv_end < b.kv_end : a.q_begin < b.q_begin;
  });
  if (all_keys) place_rows(sorted);
  for (size_t i = 1; i < sorted.size(); ++i) {
    const LocalTask &a = sorted[i - 1], &b = sorted[i];
    require(a.kv_begin != b.kv_begin || !mask.is_full() || all_keys, "two tasks have the document at key row ",
            b.kv_begin, "; with the full mask and a window it has one");
    if (a.kv_begin == b.kv_begin)
      require(b.first_row >= a.first_row + a.q_rows(), "two tasks compute row ", b.first_row,
              " of the document at key row ", b.kv_begin);
    else
      require(b.kv_begin >= a.kv_end, "the documents at key rows ", b.kv_begin, " and before ", a.kv_end, " overlap");
  }
}

}  // namespace distca::ops
