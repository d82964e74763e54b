// The tasks of torch.ops.distca.attention: rows of q and of k, v in this process's tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "torch/tensors.h"

namespace distca::ops {

/// Query rows [q_begin, q_end) see the keys [kv_begin, kv_end), of which they are the last where the mask is causal.
struct LocalTask {
  int64_t q_begin, q_end, kv_begin, kv_end;

  int64_t q_rows() const { return q_end - q_begin; }
  int64_t kv_rows() const { return kv_end - kv_begin; }
  int64_t first_row() const { return kv_rows() - q_rows(); }  // of the queries, in the document
};

/// Reads an int64 CPU tensor [N, 4]. Afterwards the tasks are sorted by (kv_begin, first row); documents and tasks of a
/// document do not overlap, nor do query rows, or it throws InvalidArgumentError.
void read_tasks(std::vector<LocalTask>& sorted, const Tensor& tasks, int64_t q_rows, int64_t kv_rows);

}  // namespace distca::ops
