// Random problems for the emulated kernels and what they have to come to, in float64, from the definitions alone.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
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

/// What is computed: a document with its scores.
struct Case {
  HeadShape heads;
  attention::Scores scores;
  int64_t length = 0;  // query rows
  int64_t keys = 0;    // as many; under the full mask any number
  std::vector<distca::BidirectionalRows> bidirectional;
  Array q, k, v, dout;  // rounded to the dtype
};

Case random_case(HeadShape heads, int64_t most_rows, std::mt19937& random);

struct Answer {
  Array out, lse, dq, dk, dv;
  Array max_logits;  // one row
};

/// For query rows with covered[row] alone; with gradients or without.
Answer answer(const Case& c, const std::vector<bool>& covered, bool gradients);

/// A case in a placement: its tasks, and the range of its groups.
struct PlacedCase {
  struct Range {
    int64_t begin, end;
  };
  const Case* c = nullptr;
  std::vector<Range> tasks;
  std::vector<bool> covered;  // query rows that a task has
  std::vector<bool> keys;     // that some group of every head has
  size_t group_begin = 0, group_end = 0;
};

/// Cases in memory as one problem: tasks, blocks of keys in two sources, everything around them not a number.
struct Placement {
  attention::Problem problem;
  std::vector<attention::cuda::Signal> signals;
  std::vector<PlacedCase> cases;

  std::vector<attention::Scores> scores;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::vector<int64_t>> blocks;
  std::vector<std::vector<distca::BidirectionalRows>> bidirectional;
  std::vector<attention::KeyGroup> groups;
  std::vector<attention::Task> task_table;
  std::vector<int64_t> first_heads;  // of each group, among the key/value heads of its case
  bool may_shift = false;
  std::vector<int64_t> shifts;  // of each group: how much later its document has the rows of the case
  std::vector<std::vector<attention::KeyGradRun>> runs;
  size_t remote_group = SIZE_MAX;  // whose rows arrive later
  std::vector<std::unique_ptr<uint64_t>> words;
  std::vector<std::unique_ptr<float[]>> max_logits;  // of each task

  /// Copies in the rows that are said to have arrived; called at once or later, once a group.
  std::vector<std::function<void()>> arrivals;
};

/// Places cases with the same heads, each with its own entry of the problem's scores. With `remote`, one of the last
/// case's groups with its last heads has rows that arrive later. With `may_shift`, groups may have the rows of their
/// case later than those before them.
std::unique_ptr<Placement> place(std::span<const Case* const> cases, bool remote, bool may_shift, std::mt19937& random);

/// Writes what backward is given of forward for one of the cases: lse and delta of every row, from the right answer.
void give_statistics(const Placement& placement, const PlacedCase& of, const Answer& right);

/// What was written for one of the cases. Rows that no task has stay not a number.
Answer results(const Placement& placement, const PlacedCase& of);

/// One sort of result against the right one: RMS of the difference over RMS of the right one, and the largest.
struct Difference {
  double rms = 0, largest = 0;
};
Difference difference(const Array& got, const Array& right, const std::vector<bool>& rows);

}  // namespace problems
