// Core attention over a table of tasks: the problem that every kernel of the library solves.
//
// For row i of a document, over the keys that the mask lets row i see:
//   out[i] = softmax(scale * q[i] K^T) V
//   lse[i] = log sum exp(scale * q[i] K^T), natural logarithm
// Backward, with P = exp(scale * q K^T - lse) and delta = rowsum(out * dout) - dlse:
//   dV = P^T dout,  dS = P * (dout V^T - delta),  dQ = scale * dS K,  dK = scale * dS^T Q
// With a softcap c, scores are S = c * tanh(scale * q K^T / c), and dS has a further factor 1 - (S / c)^2.
// Mask, scale and softcap are the group's (`Scores`), as are rows that see each other besides. One problem may have
// groups with different ones.
//
// A sink is one more score of every row of its query head, with a value of zero. Kernels know nothing of sinks: the
// home adds them to out and lse (`add_sinks`), and backward follows from that lse and that delta.
//
// Numerics: products, softmax and sums are fp32. Key blocks start at multiples of kKeyBlockRows from the start of the
// document and are visited in ascending order. Everything that is done for one row depends on that row, its keys, its
// group's scores and the head shape alone, never on the task it is in, and never on other groups. Therefore out, lse
// and dq of a row are bitwise the same whatever the tasks are (dq on CUDA: see Problem::deterministic). No row that a
// task may not see takes part in any product, not even multiplied by zero (on CUDA: see cuda_attention.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"
#include "common/mask.h"
#include "common/parallel.h"
#include "common/rows.h"

namespace distca::attention {

/// Rows of a key block. This is part of the numerics: another number changes results in the last bits.
inline constexpr int64_t kKeyBlockRows = 64;

/// How scores are made of queries and keys, and which of them count.
struct Scores {
  Mask mask;
  float scale = 1.f;
  /// If it is not 0, scores become softcap * tanh(scale * q k / softcap).
  float softcap = 0.f;

  bool operator==(const Scores&) const = default;
};

/// Where the gradients of key/value rows [begin, end) of a document are written, in `dtype`. Rows are counted from
/// `begin`. dk has the group's kv_heads heads of dim elements, dv as many of v_dim. What documents share has one place:
/// the first of its groups writes there, and those after it add, in the order of the problem and in fp32. They name the
/// same rows or some of them, and the same heads.
struct KeyGradRun {
  int64_t begin = 0;
  int64_t end = 0;
  DType dtype = DType::kFloat32;
  RowView dk;
  RowView dv;
  /// Whether it is added to what an earlier group of this problem, or an earlier problem, has written there.
  bool is_added = false;
};

/// The keys and values of one document, or of some of its heads, as one server sees them. All views of the group and of
/// its tasks start at its first key/value head and at the query heads that share it.
struct KeyGroup {
  int64_t kv_heads = 0;
  int64_t scores = 0;  // index into the problem's scores
  /// Rows of the document that see each other besides (DocumentMask): ascending and disjoint. It has all that have rows
  /// among those of the group's tasks or keys.
  std::span<const BidirectionalRows> bidirectional;
  /// Document rows that are present.
  int64_t kv_begin = 0;
  int64_t kv_end = 0;
  /// Entry b says where document row (first_block + b) * kKeyBlockRows and those after it lie. It is 2 * row + source,
  /// where source 0 is the local tensor and 1 the arena. The row may be negative where kv_begin lies inside the first
  /// block.
  int64_t first_block = 0;
  std::span<const int64_t> blocks;
  RowView k[2];
  RowView v[2];
  /// This group's tasks are tasks[task_begin, task_end) of the problem, ascending by q_begin.
  int64_t task_begin = 0;
  int64_t task_end = 0;
  /// Backward only: disjoint, in ascending order, covering [kv_begin, kv_end).
  std::span<const KeyGradRun> grads;
};

/// A CA-task as a kernel computes it: query rows [q_begin, q_end) of the group's document. Views count rows from
/// q_begin.
struct Task {
  int64_t group = 0;  // index into the problem's groups
  int64_t q_begin = 0;
  int64_t q_end = 0;
  RowView q;      // query heads x dim
  RowView out;    // query heads x v_dim; written by forward; may be the same memory as q (same strides)
  RowView lse;    // query heads x 1, fp32; written by forward, read by backward
  RowView dout;   // backward: query heads x v_dim
  RowView delta;  // backward: query heads x 1, fp32
  RowView dq;     // written by backward; may be the same memory as dout (same strides)
  /// One fp32 for each query head. Forward raises it to the head's largest score, softcap included, that a row of the
  /// task sees; to NaN if the scores of a row are no numbers. Null where nobody asks.
  float* max_logits = nullptr;
};

/// Everything that one call of a kernel computes. Tasks of one group do not overlap, and each sees only keys of its
/// group's [kv_begin, kv_end).
struct Problem {
  HeadShape heads;                 // the model's; a group may have a range of them
  std::span<const Scores> scores;  // at most kMostScores
  std::span<const KeyGroup> groups;
  std::span<const Task> tasks;
  /// Whether, in backward, dq must have the same bits whatever the tasks are, and dk and dv the same from run to run.
  /// On the CPU this is always so.
  bool deterministic = true;
  /// Whether rows travel meanwhile. A GPU's kernels then leave room for those that carry the rows.
  bool rows_travel = false;

  const Scores& scores_of(const KeyGroup& group) const { return scores[static_cast<size_t>(group.scores)]; }
  DocumentMask mask_of(const KeyGroup& group) const { return {scores_of(group).mask, group.bidirectional}; }
};

/// Throws InvalidArgumentError unless a problem has at most kMostScores scores, no window is negative, every group has
/// one of them, and its bidirectional rows are ascending and disjoint.
inline void check_scores(const Problem& problem) {
  const int64_t num_scores = std::ssize(problem.scores);
  require(num_scores <= kMostScores, "attention: a problem has ", num_scores,
          " different scores (mask, window, scale and softcap); at most ", kMostScores, " are allowed");
  for (const Scores& s : problem.scores)
    require(s.mask.window >= 0, "attention: window is ", s.mask.window, "; 0 (none) and positive ones are allowed");
  for (size_t g = 0; g < problem.groups.size(); ++g) {
    const int64_t scores = problem.groups[g].scores;
    require(0 <= scores && scores < num_scores, "attention: group ", g, " has scores ", scores, "; there are ",
            num_scores);
    int64_t last = 0;
    for (const BidirectionalRows& rows : problem.groups[g].bidirectional) {
      require(last <= rows.begin && rows.begin < rows.end, "attention: group ", g, " has bidirectional rows [",
              rows.begin, ", ", rows.end, "); allowed is an ascending range from row ", last, " on");
      last = rows.end;
    }
  }
}

/// The instruction sets that CpuAttention can use on this CPU, the best one first. "plain" is always among them. On
/// processors with tiles the first call asks the operating system for them.
DISTCA_EXPORT std::vector<std::string> cpu_instruction_sets();

/// The launcher and kernel for the CPU. It keeps its scratch memory between calls and allocates nothing once it has
/// seen the largest problem. One call at a time.
class DISTCA_EXPORT CpuAttention {
 public:
  /// `isa` forces an instruction set: "amx", "avx512_bf16", "avx512", "avx2" or "plain"; with
  /// "avx512_bf16_emulated" and "amx_emulated", which are for tests, functions stand for what AVX2 lacks. If it is
  /// empty, the environment variable DISTCA_CPU_ISA forces one. If that is unset too, the best one for this CPU is
  /// taken. Throws InvalidArgumentError for a name that is unknown or that this CPU lacks.
  explicit CpuAttention(std::string_view isa = {});
  ~CpuAttention();
  CpuAttention(CpuAttention&&) noexcept;
  CpuAttention& operator=(CpuAttention&&) noexcept;

  /// The instruction set in use.
  const char* isa() const;
  /// How it multiplies inputs of a dtype: "floats" (fp32, converted to if need be), "pairs" or "tiles" (of bf16).
  const char* operands(DType dtype) const;

  /// Writes out and lse of every task.
  void forward(const Problem& problem, const Parallel& parallel);
  /// Writes the key gradients of every group, then dq of every task. A key row that no task sees gets zeros.
  void backward(const Problem& problem, const Parallel& parallel);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What a home makes delta of: `out` and `dout`, query heads x v_dim; `dlse` and `delta`, query heads x 1, fp32.
/// Without `dlse.data`, lse has no gradient.
struct DeltaRows {
  RowView out, dout, dlse, delta;
};

/// delta[i, h] = sum over dim of out[i, h, :] * dout[i, h, :] - dlse[i, h], in fp32, for `num_rows` rows.
DISTCA_EXPORT void row_delta(const HeadShape& heads, int64_t num_rows, const DeltaRows& rows, const Parallel& parallel);

/// Adds sinks, one fp32 score for each query head, to results without them: lse = log(exp(lse) + exp(sink)), and out
/// shrinks by exp(lse before - lse after). Rows whose lse is -inf stay as they are.
DISTCA_EXPORT void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse,
                             const float* sinks, const Parallel& parallel);

/// dsinks[h] = - sum over rows of exp(sinks[h] - lse[i, h]) * delta[i, h], in double, rows in ascending order. It makes
/// delta itself, and does not write it. Rows whose lse is -inf add nothing.
DISTCA_EXPORT void sink_gradient(const HeadShape& heads, int64_t num_rows, const DeltaRows& rows, const RowView& lse,
                                 const float* sinks, float* dsinks, const Parallel& parallel);

}  // namespace distca::attention
