// torch.ops.distca.attention and its backward: the fused kernel over a table of tasks, in this process's tensors alone.
//
// `tasks` is an int64 CPU tensor [N, 4]: (q_begin, q_end, kv_begin, kv_end), rows of q and of k/v. A document starts at
// kv_begin. The queries are its last q_end - q_begin rows up to kv_end (causal, aligned at the end; with a window, each
// sees so many keys, the last one its own). With the full mask each query sees all keys of its task.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "common/align.h"
#include "runtime/backend.h"
#include "torch/flash.h"
#include "torch/local_tasks.h"
#include "torch/memory.h"
#include "torch/tensors.h"

namespace distca::ops {
namespace {

using attention::kKeyBlockRows;

/// The host memory of one thread's local attention, for one device and one choice of kernels. Every call uses it again.
struct Workspace {
  std::vector<LocalTask> sorted;
  std::vector<attention::Task> tasks;
  std::vector<attention::KeyGroup> groups;
  std::vector<attention::KeyGradRun> grads;
  std::vector<int64_t> blocks;
  std::shared_ptr<runtime::Backend> backend;
};

/// The operators' argument `attention`.
struct Choice {
  std::optional<Text> text;

  explicit Choice(std::optional<StringHandle> handle) {
    if (handle) text.emplace(*handle);
  }
  /// Who computes these: "own" or "flash".
  std::string chosen_for(const Tensor& q, const Tensor& k, const Tensor& v) const {
    return runtime::chosen_attention(text ? std::optional(std::string_view(*text)) : std::nullopt, device_name(q),
                                     heads_of(q, k, v));
  }
};

/// A thread's workspaces, by device and choice. They go with the thread, but for those of a GPU while the process ends.
/// PyTorch joins the threads of its backward only then, when CUDA, or a profiler that listens to it, may be gone
/// already.
class ThreadWorkspaces {
 public:
  ~ThreadWorkspaces() {
    if (process_is_ending) instances_.release();
  }
  Workspace& at(const std::string& device, const std::string& chosen) {
    if (device != "cpu" && !std::exchange(is_watching_, true)) std::atexit([] { process_is_ending = true; });
    return (*instances_)[{device, chosen}];
  }

 private:
  using Instances = std::map<std::pair<std::string, std::string>, Workspace>;
  static inline std::atomic<bool> process_is_ending{false};
  std::unique_ptr<Instances> instances_ = std::make_unique<Instances>();
  /// Whether this thread has told the process to say when it ends. What is told last is heard first: before PyTorch's
  /// engine, which is older than its threads, joins them.
  bool is_watching_ = false;
};

Workspace& workspace(const Tensor& like, const std::string& chosen) {
  thread_local ThreadWorkspaces workspaces;
  const std::string device = device_name(like);
  Workspace& w = workspaces.at(device, chosen);
  if (!w.backend) w.backend = runtime::make_backend(device, chosen);
  return w;
}

/// The workspace, after a check that its backend takes such heads.
Workspace& checked_workspace(const Tensor& q, const Tensor& k, const Tensor& v, double softcap,
                             const std::string& chosen) {
  const HeadShape heads = heads_of(q, k, v);
  Workspace& w = workspace(q, chosen);
  w.backend->check(heads, checked_softcap(softcap));
  return w;
}

/// The workspace of the own kernels on a GPU, or null where ATen computes straight from the tensors. Only if flash
/// attention lacks something, its backend is made: that one says whether the own kernels have it.
Workspace* gpu_workspace(const Tensor& q, const Tensor& k, const Tensor& v, double softcap, const Choice& choice) {
  return guarded([&]() -> Workspace* {
    const std::string chosen = choice.chosen_for(q, k, v);
    if (chosen == "own") return &checked_workspace(q, k, v, softcap, chosen);
    try {
      check_flash(q, heads_of(q, k, v), checked_softcap(softcap));
    } catch (const InvalidArgumentError&) {
      checked_workspace(q, k, v, softcap, chosen);
      throw;
    }
    return nullptr;
  });
}

/// Groups the sorted tasks by document.
void group_tasks(Workspace& w, int64_t kv_heads, const RowView& k, const RowView& v) {
  w.groups.clear();
  w.tasks.clear();
  w.blocks.clear();
  int64_t total_blocks = 0;
  for (size_t i = 0; i < w.sorted.size();) {
    const int64_t begin = w.sorted[i].kv_begin;
    attention::KeyGroup g;
    g.kv_heads = kv_heads;
    g.task_begin = static_cast<int64_t>(i);
    for (; i < w.sorted.size() && w.sorted[i].kv_begin == begin; ++i) {
      const LocalTask& t = w.sorted[i];
      g.kv_end = t.kv_rows();
      attention::Task task;
      task.group = static_cast<int64_t>(w.groups.size());
      task.q_begin = t.first_row;
      task.q_end = t.first_row + t.q_rows();
      w.tasks.push_back(task);
    }
    g.task_end = static_cast<int64_t>(i);
    g.k[0] = k.from_row(begin);
    g.v[0] = v.from_row(begin);
    w.groups.push_back(g);
    total_blocks = std::max(total_blocks, ceil_div(g.kv_end, kKeyBlockRows));
  }
  // Each document starts at row 0 of its own view; therefore one table of consecutive blocks serves all.
  for (int64_t b = 0; b < total_blocks; ++b) w.blocks.push_back(2 * b * kKeyBlockRows);
  for (attention::KeyGroup& g : w.groups)
    g.blocks = std::span(w.blocks).first(static_cast<size_t>(ceil_div(g.kv_end, kKeyBlockRows)));
}

attention::Scores scores_of(const LocalOptions& options, const HeadShape& heads) {
  return {options.mask, scale_or_default(options.scale, heads), checked_softcap(options.softcap)};
}

int64_t covered_rows(const Workspace& w) {
  int64_t rows = 0;
  for (const LocalTask& t : w.sorted) rows += t.q_rows();
  return rows;
}

/// `max_logits`: the largest scores, which are raised; null where nobody asks.
std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                             const std::optional<Tensor>& sinks, const LocalOptions& options,
                                             float* max_logits, Workspace& w) {
  return guarded([&] {
    const HeadShape heads = heads_of(q, k, v);
    const attention::Scores scores = scores_of(options, heads);
    const float* const sink_values = sinks_of(sinks, q, heads);
    read_tasks(w.sorted, tasks, q.size(0), k.size(0), options.mask);
    group_tasks(w, heads.kv_heads, rows_of(k, "k"), rows_of(v, "v"));
    Tensor out = empty_rows(q, q.size(0), heads.q_heads, heads.v_dim);
    Tensor lse = empty_scalars(q, q.size(0), heads.q_heads);
    if (covered_rows(w) < q.size(0)) {
      torch::stable::zero_(out);
      torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    }
    for (size_t i = 0; i < w.tasks.size(); ++i) {
      const int64_t row = w.sorted[i].q_begin;
      w.tasks[i].q = rows_of(q, "q").from_row(row);
      w.tasks[i].out = rows_of(out, "out").from_row(row);
      w.tasks[i].lse = scalars_of(lse, "lse").from_row(row);
      w.tasks[i].max_logits = max_logits;
    }
    w.backend->forward({heads, {&scores, 1}, w.groups, w.tasks, options.deterministic}, torch_threads());
    if (sink_values != nullptr) {
      w.backend->add_sinks(heads, q.size(0), rows_of(out, "out"), scalars_of(lse, "lse"), sink_values, torch_threads());
    }
    return std::tuple{out, lse};
  });
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& dout_any, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& out, const Tensor& lse,
                                                      const Tensor& tasks, const std::optional<Tensor>& sinks,
                                                      const LocalOptions& options, const std::optional<Tensor>& dlse,
                                                      Workspace& w) {
  return guarded([&] {
    const HeadShape heads = heads_of(q, k, v);
    const attention::Scores scores = scores_of(options, heads);
    sinks_of(sinks, q, heads);  // they are in lse; here they are only checked
    const int64_t rows = q.size(0);
    const Tensor dout = with_dense_rows(dout_any);
    check_like_out(dout, "dout", heads, rows);
    check_like_out(out, "out", heads, rows);
    const RowView lse_rows = scalars_of(lse, "lse");
    check_device_of(q, dout, "dout");
    check_device_of(q, out, "out");
    check_device_of(q, lse, "lse");
    require(lse.size(0) == rows && lse.size(1) == heads.q_heads, "lse has shape ", shape_of(lse), "; [", rows, ", ",
            heads.q_heads, "] is expected");
    read_tasks(w.sorted, tasks, rows, k.size(0), options.mask);
    group_tasks(w, heads.kv_heads, rows_of(k, "k"), rows_of(v, "v"));
    Tensor dq = empty_rows(q, rows, heads.q_heads, heads.dim);
    Tensor dk = empty_rows(k, k.size(0), heads.kv_heads, heads.dim);
    Tensor dv = empty_rows(v, k.size(0), heads.kv_heads, heads.v_dim);
    int64_t key_rows = 0;
    for (const attention::KeyGroup& g : w.groups) key_rows += g.kv_end;
    if (covered_rows(w) < rows) torch::stable::zero_(dq);
    if (key_rows < k.size(0)) {
      torch::stable::zero_(dk);
      torch::stable::zero_(dv);
    }
    const std::shared_ptr<std::byte> deltas = w.backend->scratch(rows * heads.q_heads * 4);
    const RowView delta{deltas.get(), heads.q_heads * 4, 4};
    const std::optional<Tensor> taken = taken_gradient_of_lse(w.backend->takes_gradient_of_lse(), dlse);
    const attention::DeltaRows home{rows_of(out, "out"), rows_of(dout, "dout"), gradient_of_lse(taken, lse), delta};
    w.backend->row_delta(heads, rows, home, torch_threads());
    for (size_t i = 0; i < w.tasks.size(); ++i) {
      const int64_t row = w.sorted[i].q_begin;
      w.tasks[i].q = rows_of(q, "q").from_row(row);
      w.tasks[i].dout = rows_of(dout, "dout").from_row(row);
      w.tasks[i].lse = lse_rows.from_row(row);
      w.tasks[i].delta = delta.from_row(row);
      w.tasks[i].dq = rows_of(dq, "dq").from_row(row);
    }
    w.grads.clear();
    w.grads.reserve(w.groups.size());  // spans into it are taken below
    for (attention::KeyGroup& g : w.groups) {
      const int64_t row = w.sorted[static_cast<size_t>(g.task_begin)].kv_begin;
      w.grads.push_back({0, g.kv_end, heads.dtype, rows_of(dk, "dk").from_row(row), rows_of(dv, "dv").from_row(row)});
      g.grads = std::span(w.grads).last(1);
    }
    w.backend->backward({heads, {&scores, 1}, w.groups, w.tasks, options.deterministic}, torch_threads());
    return std::tuple{dq, dk, dv};
  });
}

Workspace& cpu_workspace(const Tensor& q, const Tensor& k, const Tensor& v, double softcap, const Choice& choice) {
  return *guarded([&] { return &checked_workspace(q, k, v, softcap, choice.chosen_for(q, k, v)); });
}

/// attention_forward on the device of the tensors, by whom `choice` says.
std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                   const std::optional<Tensor>& sinks, const LocalOptions& options,
                                   const Choice& choice, float* max_logits) {
  if (q.is_cpu()) {
    Workspace& w = cpu_workspace(q, k, v, options.softcap, choice);
    return attention_forward(q, k, v, tasks, sinks, options, max_logits, w);
  }
  Workspace* const w = gpu_workspace(q, k, v, options.softcap, choice);
  if (w == nullptr) {
    guarded([&] { require(max_logits == nullptr, kNoMaxLogits); });
    return attention_by_flash(q, k, v, tasks, sinks, options);
  }
  return attention_forward(aligned_rows(q), aligned_rows(k), aligned_rows(v), tasks, sinks, options, max_logits, *w);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                     std::optional<Tensor> sinks, std::optional<double> scale, double softcap,
                                     bool deterministic, std::optional<StringHandle> attention, StringHandle mask,
                                     std::optional<int64_t> window) {
  const Choice choice(attention);
  return forward(q, k, v, tasks, sinks, local_options(scale, softcap, deterministic, mask, window), choice, nullptr);
}
std::tuple<Tensor, Tensor, Tensor> attention_all(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                                 std::optional<Tensor> sinks, std::optional<double> scale,
                                                 double softcap, bool deterministic,
                                                 std::optional<StringHandle> attention, StringHandle mask,
                                                 std::optional<int64_t> window) {
  const Choice choice(attention);
  const LocalOptions options = local_options(scale, softcap, deterministic, mask, window);
  Tensor max_logits = guarded([&] { return empty_floats(q, heads_of(q, k, v).q_heads); });
  torch::stable::fill_(max_logits, -std::numeric_limits<double>::infinity());
  const auto [out, lse] = forward(q, k, v, tasks, sinks, options, choice, floats_of(max_logits));
  return {out, lse, max_logits};
}
std::tuple<Tensor, Tensor, Tensor> cpu_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& out, const Tensor& lse, const Tensor& tasks,
                                                std::optional<Tensor> sinks, std::optional<double> scale,
                                                double softcap, bool deterministic,
                                                std::optional<StringHandle> attention, std::optional<Tensor> dlse,
                                                StringHandle mask, std::optional<int64_t> window) {
  const Choice choice(attention);
  const LocalOptions options = local_options(scale, softcap, deterministic, mask, window);
  Workspace& w = cpu_workspace(q, k, v, softcap, choice);
  return attention_backward(dout, q, k, v, out, lse, tasks, sinks, options, dlse, w);
}

std::tuple<Tensor, Tensor, Tensor> gpu_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& out, const Tensor& lse, const Tensor& tasks,
                                                std::optional<Tensor> sinks, std::optional<double> scale,
                                                double softcap, bool deterministic,
                                                std::optional<StringHandle> attention, std::optional<Tensor> dlse,
                                                StringHandle mask, std::optional<int64_t> window) {
  const Choice choice(attention);
  const LocalOptions options = local_options(scale, softcap, deterministic, mask, window);
  Workspace* const w = gpu_workspace(q, k, v, softcap, choice);
  if (w == nullptr) return attention_by_flash_backward(dout, q, k, v, out, lse, tasks, sinks, options, dlse);
  return attention_backward(aligned_rows(with_dense_rows(dout)), aligned_rows(q), aligned_rows(k), aligned_rows(v), out,
                            lse, tasks, sinks, options, dlse, *w);
}

/// The gradient of sinks, for core_attention as for attention: all that it needs lies at home.
Tensor sink_gradient(const Tensor& dout_any, const Tensor& out, const Tensor& lse, const Tensor& sinks,
                     std::optional<Tensor> dlse) {
  return guarded([&] {
    const Tensor dout = with_dense_rows(dout_any);
    const RowView lse_rows = scalars_of(lse, "lse");
    const HeadShape heads{out.size(1), 1, out.size(2), out.size(2), dtype_of(out, "out")};
    check_like_out(dout, "dout", heads, out.size(0));
    require(lse.size(0) == out.size(0) && lse.size(1) == heads.q_heads, "lse has shape ", shape_of(lse), "; [",
            out.size(0), ", ", heads.q_heads, "] is expected");
    const float* values = sinks_of(sinks, out, heads);
    const int64_t sizes[] = {heads.q_heads};
    Tensor dsinks = torch::stable::new_empty(sinks, sizes);
    const attention::DeltaRows rows{rows_of(out, "out"), rows_of(dout, "dout"), gradient_of_lse(dlse, lse), {}};
    attention::sink_gradient(heads, out.size(0), rows, lse_rows, values, static_cast<float*>(dsinks.data_ptr()),
                             torch_threads());
    return dsinks;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distca, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor tasks, Tensor? sinks=None, *, float? scale=None, "
      "float softcap=0., bool deterministic=False, str? attention=None, str mask='causal', int? window=None) -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "attention_all(Tensor q, Tensor k, Tensor v, Tensor tasks, Tensor? sinks=None, *, float? scale=None, "
      "float softcap=0., bool deterministic=False, str? attention=None, str mask='causal', int? window=None) -> "
      "(Tensor out, Tensor lse, Tensor max_logits)");
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor tasks, "
      "Tensor? sinks=None, *, float? scale=None, float softcap=0., bool deterministic=False, "
      "str? attention=None, Tensor? dlse=None, str mask='causal', int? window=None) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  m.def("sink_gradient(Tensor dout, Tensor out, Tensor lse, Tensor sinks, Tensor? dlse=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(distca, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_all", TORCH_BOX(&attention_all));
  m.impl("attention_backward", TORCH_BOX(&cpu_backward));
  m.impl("sink_gradient", TORCH_BOX(&sink_gradient));
}

STABLE_TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_all", TORCH_BOX(&attention_all));
  m.impl("attention_backward", TORCH_BOX(&gpu_backward));
}

}  // namespace distca::ops
