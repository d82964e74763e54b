// The dispatcher: runs one rank's slice of a plan over the transport. Forward: dispatch, attend, collect; so is
// backward.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "common/parallel.h"
#include "plan/tables.h"
#include "runtime/protocol.h"

namespace distca::runtime {

/// The tensors of this rank, [T, heads, dim] with T = the layout's rows of this rank. Inputs are never written.
struct ForwardTensors {
  RowView q, k, v;
  RowView out, lse;  // returned; lse [T, q_heads] fp32
};
struct BackwardTensors {
  RowView q, k, v, out, lse, dout;
  RowView dq, dk, dv;  // returned
};

class Dispatcher {
 public:
  explicit Dispatcher(Protocol& protocol) : protocol_(protocol) {}

  void forward(const plan::SliceView& slice, const ForwardTensors& tensors, const ScoreOptions& scores,
               const Parallel& parallel);
  void backward(const plan::SliceView& slice, const BackwardTensors& tensors, const ScoreOptions& scores,
                const Parallel& parallel);

  /// For tests: fill the arena and the returned tensors with NaN before every step.
  void set_fill_with_nan(bool on) { fill_with_nan_ = on; }

 private:
  /// A range of key/value heads; query heads follow from it.
  struct KvHeads {
    int64_t begin = 0, end = 0;
  };
  template <class Row>
  static KvHeads heads_of(const Row& row) {
    return {row.kv_head_begin, row.kv_head_end};
  }
  KvHeads all_heads() const { return {0, heads_.kv_heads}; }

  /// Where a tensor of this rank lies, by TensorKind; null where the step does not have it.
  using LocalTensors = std::array<RowView, static_cast<size_t>(plan::TensorKind::kCount)>;

  /// A step, once `local_` says where this rank's tensors are.
  void run(const plan::SliceView& slice, plan::Phase phase, const ScoreOptions& scores, const Parallel& parallel);
  void open(const plan::SliceView& slice, plan::Phase phase, const ScoreOptions& scores);
  void dispatch(const plan::SliceView& slice);
  void attend(const plan::SliceView& slice, const ScoreOptions& scores, bool local, const Parallel& parallel);
  /// Where the key gradients of a group go; the runs join grads_.
  std::span<const attention::KeyGradRun> add_gradient_runs(const plan::SliceView& slice, const plan::GroupRow& g);
  void collect(const plan::SliceView& slice);
  void send_home(const plan::SliceView& slice, int64_t round);
  void receive_home(const plan::SliceView& slice, int64_t round);
  void finish_sums(const plan::SliceView& slice);
  void fill_padding(const plan::SliceView& slice);
  void fill_nan(const plan::SliceView& slice);

  /// How rows of a range of heads lie in an arena, and where one such extent is.
  plan::RowFormat format(plan::Direction direction, plan::TensorKind kind, const KvHeads& heads) const;
  RowView in_arena(plan::Direction direction, plan::TensorKind kind, const KvHeads& heads, int64_t offset) const;
  RowExtent extent(plan::Direction direction, plan::TensorKind kind, const KvHeads& heads, int64_t num_rows) const;
  const RowView& local(plan::TensorKind kind) const { return local_[static_cast<size_t>(kind)]; }
  /// A tensor of this rank from a row on, and from the first of a range of heads.
  RowView local(plan::TensorKind kind, const KvHeads& heads, int64_t row) const;

  Protocol& protocol_;
  attention::CpuAttention kernel_;
  bool fill_with_nan_ = false;

  // The step under way.
  plan::Phase phase_ = plan::Phase::kForward;
  HeadShape heads_;
  std::byte* arena_ = nullptr;
  LocalTensors local_ = {};

  // Scratch that only grows.
  std::vector<attention::KeyGroup> groups_;
  std::vector<attention::Task> tasks_;
  std::vector<attention::KeyGradRun> grads_;
  std::vector<float> delta_;
};

}  // namespace distca::runtime
