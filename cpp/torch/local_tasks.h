// The tasks of torch.ops.distca.attention, over rows of q, k and v in this process's tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "torch/tensors.h"

namespace distca::ops {

/// Query rows [q_begin, q_end) that see the keys [kv_begin, kv_end). Where the mask is causal, the queries are the last
/// of these rows.
struct LocalTask {
  int64_t q_begin, q_end, kv_begin, kv_end;

  int64_t q_rows() const { return q_end - q_begin; }
  int64_t kv_rows() const { return kv_end - kv_begin; }
  int64_t first_row() const { return kv_rows() - q_rows(); }  // the first query's row in the document
};

/// Reads tasks from an int64 CPU tensor [N, 4] and sorts them by (kv_begin, first row). Throws InvalidArgumentError if
/// documents, tasks of one document, or query rows overlap.
void read_tasks(std::vector<LocalTask>& sorted, const Tensor& tasks, int64_t q_rows, int64_t kv_rows);

}  // namespace distca::ops
