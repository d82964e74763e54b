// Random problems for the emulated kernels and what they have to come to, in float64, from the definitions alone.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "attention/tables.h"

namespace problems {

using distca::DType;
using distca::HeadShape;
using distca::Mask;
using distca::MaskKind;
using distca::RowView;
namespace attention = distca::attention;

/// Row-major [rows, heads, dim].
struct Array {
  int64_t heads = 0, dim = 0;
  std::vector<double> x;

  Array() = default;
  Array(int64_t rows, int64_t h, int64_t d) : heads(h), dim(d), x(static_cast<size_t>(rows * h * d)) {}
  double* at(int64_t row, int64_t head) { return x.data() + (row * heads + head) * dim; }
  const double* at(int64_t row, int64_t head) const { return x.data() + (row * heads + head) * dim; }
};

float read(DType dtype, const std::byte* p);
void write(DType dtype, std::byte* p, double x);

/// What is computed: a document with a mask.
struct Case {
  HeadShape heads;
  Mask mask;
  float scale = 1.f;
  float softcap = 0.f;
  int64_t length = 0;
  Array q, k, v, dout;  // rounded to the dtype
};

Case random_case(HeadShape heads, int64_t most_rows, std::mt19937& random);

struct Answer {
  Array out, lse, dq, dk, dv;
};

/// For query rows with covered[row] alone; with gradients or without.
Answer answer(const Case& c, const std::vector<bool>& covered, bool gradients);

/// A case in memory: tasks, blocks of keys in two sources, everything around them not a number.
struct Placement {
  attention::Problem problem;
  std::vector<attention::cuda::Signal> signals;
  std::vector<bool> covered;  // query rows that a task has

  struct Range {
    int64_t begin, end;
  };
  std::vector<Range> tasks;
  int64_t kv_begin = 0, kv_end = 0;
  int64_t head_split = 0;  // groups of heads: [0, head_split), [head_split, kv_heads)

  std::vector<std::vector<std::byte>> memory;
  std::vector<std::vector<int64_t>> blocks;
  std::vector<attention::KeyGroup> groups;
  std::vector<attention::Task> task_table;
  std::vector<std::vector<attention::KeyGradRun>> runs;
  std::vector<std::unique_ptr<uint64_t>> words;

  /// Copies in the rows that are said to have arrived; called at once or later, once a group.
  std::vector<std::function<void()>> arrivals;
};

std::unique_ptr<Placement> place(const Case& c, bool remote, std::mt19937& random);

/// Writes what backward is given of forward: lse and delta of every row, from the right answer.
void give_statistics(const Case& c, const Answer& right, Placement& placement);

/// What was written to a placement. Rows that no task has stay not a number.
Answer results(const Case& c, const Placement& placement);

/// One sort of result against the right one: RMS of the difference over RMS of the right one, and the largest.
struct Difference {
  double rms = 0, largest = 0;
};
Difference difference(const Array& got, const Array& right, const std::vector<bool>& rows);

}  // namespace problems
