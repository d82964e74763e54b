// The tasks and options of torch.ops.distca.attention, over rows of q, k and v in this process's tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/mask.h"
#include "torch/memory.h"
#include "torch/tensors.h"

namespace distca::ops {

/// Query rows [q_begin, q_end) that see the keys [kv_begin, kv_end). Where the mask is causal or has a window, the
/// queries are the last of these rows.
struct LocalTask {
  int64_t q_begin, q_end, kv_begin, kv_end;
  int64_t first_row = 0;  // the first query's row in the document; read_tasks sets it

  int64_t q_rows() const { return q_end - q_begin; }
  int64_t kv_rows() const { return kv_end - kv_begin; }
};

/// What the operators are asked for, besides tensors and who computes.
struct LocalOptions {
  Mask mask;
  std::optional<double> scale;
  double softcap = 0.0;
  bool deterministic = false;
};

/// The options of an operator's arguments. Throws InvalidArgumentError if there is no such mask.
LocalOptions local_options(std::optional<double> scale, double softcap, bool deterministic, StringHandle mask,
                           std::optional<int64_t> window);

/// Reads tasks from an int64 CPU tensor [N, 4] and sorts them by document and first row. With a causal mask or a window
/// the queries of a task are the last rows before kv_end. With the full mask alone they are any rows: those of a
/// document's tasks count from 0 on. Throws InvalidArgumentError if documents, tasks of one document, or query rows
/// overlap; if a document has more queries than keys, but for the full mask alone; or if, with the full mask, its tasks
/// have different keys or, with a window, it has several.
void read_tasks(std::vector<LocalTask>& sorted, const Tensor& tasks, int64_t q_rows, int64_t kv_rows, const Mask& mask);

}  // namespace distca::ops
