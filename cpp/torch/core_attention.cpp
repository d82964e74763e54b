// torch.ops.distca.core_attention and its backward, each of which is one collective step; and the parts of such steps.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/context.h"
#include "torch/aten.h"
#include "torch/flash.h"
#include "torch/memory.h"
#include "torch/tensors.h"

namespace distca::ops {
namespace {

using runtime::Part;

/// Throws unless the context works where the tensors are, and takes such heads and scores.
void check_backend(const runtime::Context& context, const Tensor& q, const plan::SliceView& slice,
                   const runtime::ScoreOptions& scores) {
  const std::string device = context.backend().device();
  require(device == device_name(q), "context \"", context.options().name, "\" is on ", device, ", the tensors are on ",
          device_name(q), "; give distca.init device=\"", device_name(q), "\"");
  float softcap = context.accept(slice, scores).softcap;
  for (const plan::ScoresRow& row : slice.scores())
    if (row.softcap != plan::kOfTheCall) softcap = std::max(softcap, plan::score_value(row.softcap));
  context.backend().check(slice.heads(), softcap);
}

/// Runs the body of a collective operator. If it throws before a step begins, this rank refuses the call.
template <class Body>
auto collective(std::string_view context, const Body& body) {
  return guarded([&] {
    try {
      return body();
    } catch (const std::exception& error) {
      runtime::refuse(context, error.what());  // does nothing where the error was a fault of the step
      throw;
    }
  });
}

/// Rows that the device's kernels can load: those of a GPU load 16 bytes at once, those of the CPU take rows as they
/// are.
Tensor loadable(const Tensor& rows) { return rows.is_cpu() ? rows : aligned_rows(rows); }

/// Throws if a recording would read the copy that was made of an argument, and a replay would not make the copy again:
/// without a captured graph, and for tensors of the CPU, nothing but the steps is done again.
void check_recorded(const runtime::Context& context, const Tensor& given, const Tensor& used, const char* name) {
  require(!context.is_recording() || used.data_ptr() == given.data_ptr() || (context.is_captured() && !used.is_cpu()),
          name,
          " was copied, because it has gaps inside its rows or is not aligned to 16 bytes, and a replay would not ",
          "make the copy again; record it without gaps and aligned");
}

/// Keeps the memory that a recording reads and writes by its address, whatever other memory a caller gives to the
/// tensors themselves (`q.data = ...`). A graph's pool keeps its own.
void keep_memory(const runtime::Context& context, std::initializer_list<const Tensor*> tensors,
                 std::initializer_list<const std::optional<Tensor>*> optional, std::vector<Tensor>& kept) {
  if (!context.is_recording() || context.is_captured()) return;
  for (const Tensor* t : tensors) kept.push_back(aten::unary("aten::alias", *t));
  for (const std::optional<Tensor>* t : optional)
    if (t->has_value()) kept.push_back(aten::unary("aten::alias", **t));
}

/// The options that all operators of a step have.
struct StepOptions {
  std::string_view context;
  std::optional<double> scale;
  double softcap;
  bool deterministic;

  /// Throws if one of them is wrong. The result views the sinks.
  runtime::ScoreOptions scores(const Tensor& q, const HeadShape& heads, const std::optional<Tensor>& sinks) const {
    return {scale_or_default(scale, heads), checked_softcap(softcap), sinks_of(sinks, q, heads), deterministic};
  }
};

/// The arguments of an operator that begins a forward step.
struct ForwardArguments {
  const Tensor &q, &k, &v, &plan;
  const std::optional<Tensor>&plan_backward, &sinks;
  StepOptions options;
  bool retain = false;      // whether a backward step will follow
  bool max_logits = false;  // whether they are asked for
};

/// The arguments of an operator that begins a backward step.
struct BackwardArguments {
  const Tensor &dout, &q, &k, &v, &out, &lse, &plan;
  const std::optional<Tensor>&sinks, &retained, &dlse;
  StepOptions options;
};

/// The checked arguments of a forward step, and the tensors that it returns. Everything that it views lives as long as
/// it does.
struct Forward {
  explicit Forward(const ForwardArguments& a)
      : q(loadable(a.q)),
        k(loadable(a.k)),
        v(loadable(a.v)),
        plan(a.plan),
        heads(heads_of(q, k, v)),
        context(runtime::find_context(a.options.context)),
        sinks(a.sinks),
        out(empty_rows(q, q.size(0), heads.q_heads, heads.v_dim)),
        lse(empty_scalars(q, q.size(0), heads.q_heads)) {
    require(q.size(0) == k.size(0), "q ", shape_of(q), " and k ", shape_of(k), " have different lengths");
    slice = context->accept(plan_words(plan, "plan"), heads, q.size(0));
    scores = a.options.scores(q, heads, sinks);
    check_backend(*context, q, slice, scores);
    check_recorded(*context, a.q, q, "q");
    check_recorded(*context, a.k, k, "k");
    check_recorded(*context, a.v, v, "v");
    if (a.retain) retained = empty_bytes(q, slice.header().retained_bytes);
    if (a.max_logits) {
      require(context->backend().finds_max_logits(), kNoMaxLogits);
      require(heads.q_heads <= runtime::MaxLogits::kMostHeads, "max_logits of ", heads.q_heads, " query heads; up to ",
              runtime::MaxLogits::kMostHeads, " on a rank are allowed");
      max_logits = empty_floats(q, heads.q_heads);
    }
    check_backward(a.plan_backward);
    keep_memory(*context, {&q, &k, &v, &out, &lse}, {&sinks, &max_logits}, kept);
  }

  /// Throws unless a backward step with `plan_backward` asks for exactly what this step retains, or for nothing.
  void check_backward(const std::optional<Tensor>& plan_backward) const {
    if (!plan_backward) return;
    const plan::SliceView backward = context->accept(plan_words(*plan_backward, "plan_backward"), heads, q.size(0));
    context->check_same_problem(slice, backward);
    const plan::Header &h = backward.header(), &own = slice.header();
    require(h.retains == 0 || (own.retains != 0 && h.plan_digest == own.plan_digest),
            "plan_backward retains keys, but of another ",
            "plan than the one of forward: make plan_backward without retain_bytes");
  }

  runtime::ForwardTensors tensors() const {
    return {rows_of(q, "q"),      rows_of(k, "k"),        rows_of(v, "v"),
            rows_of(out, "out"),  scalars_of(lse, "lse"), retained ? bytes_of(*retained) : nullptr,
            floats_of(max_logits)};
  }
  /// All that the step returns. What nobody asked for is empty.
  std::tuple<Tensor, Tensor, Tensor, Tensor> results() const {
    return {out, lse, retained ? *retained : empty_bytes(q, 0), max_logits ? *max_logits : empty_floats(q, 0)};
  }

  Tensor q, k, v, plan;
  HeadShape heads;
  std::shared_ptr<runtime::Context> context;
  std::optional<Tensor> sinks;
  plan::SliceView slice{{}};
  runtime::ScoreOptions scores;
  Tensor out, lse;
  std::optional<Tensor> retained, max_logits;
  std::vector<Tensor> kept;
};

/// The checked arguments of a backward step, and the tensors that it returns.
struct Backward {
  explicit Backward(const BackwardArguments& a)
      : dout(loadable(with_dense_rows(a.dout))),
        q(loadable(a.q)),
        k(loadable(a.k)),
        v(loadable(a.v)),
        out(a.out),
        lse(a.lse),
        plan(a.plan),
        heads(heads_of(q, k, v)),
        context(runtime::find_context(a.options.context)),
        sinks(a.sinks),
        dq(empty_rows(q, q.size(0), heads.q_heads, heads.dim)),
        dk(empty_rows(k, q.size(0), heads.kv_heads, heads.dim)),
        dv(empty_rows(v, q.size(0), heads.kv_heads, heads.v_dim)) {
    const int64_t rows = q.size(0);
    check_like_out(dout, "dout", heads, rows);
    check_recorded(*context, a.dout, dout, "dout");
    check_recorded(*context, a.q, q, "q");
    check_recorded(*context, a.k, k, "k");
    check_recorded(*context, a.v, v, "v");
    check_like_out(out, "out", heads, rows);
    scalars_of(lse, "lse");
    check_device_of(q, dout, "dout");
    check_device_of(q, out, "out");
    check_device_of(q, lse, "lse");
    dlse = taken_gradient_of_lse(context->backend().takes_gradient_of_lse(), a.dlse);
    require(k.size(0) == rows && lse.size(0) == rows && lse.size(1) == heads.q_heads,
            "q, k, v, out and lse have different lengths or head counts");
    slice = context->accept(plan_words(plan, "plan"), heads, rows);
    scores = a.options.scores(q, heads, sinks);
    check_backend(*context, q, slice, scores);
    take_retained(a.retained);
    keep_memory(*context, {&dout, &q, &k, &v, &out, &lse, &dq, &dk, &dv}, {&sinks, &dlse}, kept);
  }

  runtime::BackwardTensors tensors() const {
    return {rows_of(q, "q"),
            rows_of(k, "k"),
            rows_of(v, "v"),
            rows_of(out, "out"),
            scalars_of(lse, "lse"),
            rows_of(dout, "dout"),
            gradient_of_lse(dlse, lse),
            retained ? bytes_of(*retained) : nullptr,
            rows_of(dq, "dq"),
            rows_of(dk, "dk"),
            rows_of(dv, "dv")};
  }

  /// Takes what forward has kept on this rank, after a check against the plan.
  void take_retained(const std::optional<Tensor>& given) {
    const plan::Header& h = slice.header();
    if (h.retains == 0) return;
    require(given.has_value() && given->numel() == h.retained_bytes, "backward of a plan with retain_bytes needs the ",
            h.retained_bytes, " bytes that its forward step kept on this rank, and has ",
            given.has_value() ? std::to_string(given->numel()) : "none",
            "; call distca.core_attention (or distca.dispatch) with inputs that need a gradient");
    require(given->scalar_type() == torch::headeronly::ScalarType::Byte && given->is_contiguous(),
            "what forward has retained must be a contiguous uint8 tensor");
    check_device_of(q, *given, "retained");
    retained = *given;
    if (reinterpret_cast<uintptr_t>(given->data_ptr()) % 16 == 0) return;  // kernels of a GPU load 16 bytes at once
    retained = empty_bytes(q, h.retained_bytes);
    torch::stable::copy_(*retained, *given);
  }

  Tensor dout, q, k, v, out, lse, plan;
  HeadShape heads;
  std::shared_ptr<runtime::Context> context;
  std::optional<Tensor> sinks;
  plan::SliceView slice{{}};
  runtime::ScoreOptions scores;
  Tensor dq, dk, dv;
  std::optional<Tensor> retained, dlse;
  std::vector<Tensor> kept;
};

std::tuple<Tensor, Tensor> core_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& plan,
                                          std::optional<Tensor> plan_backward, std::optional<Tensor> sinks,
                                          StringHandle context, std::optional<double> scale, double softcap,
                                          bool deterministic) {
  const Text name(context);
  return collective(name, [&] {
    const auto f = make_reused<Forward>(
        ForwardArguments{q, k, v, plan, plan_backward, sinks, {name, scale, softcap, deterministic}});
    require(f->slice.header().retains == 0, "the plan has retain_bytes, and this operator returns nothing to keep for ",
            "backward; call distca.core_attention, or torch.ops.distca.core_attention_all");
    const auto ctx = std::exchange(f->context, nullptr);  // the context may hold f: this avoids a cycle
    ctx->forward(f->slice, f->tensors(), f->scores, torch_threads(), f);
    return std::tuple{f->out, f->lse};
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> core_attention_all(const Tensor& q, const Tensor& k, const Tensor& v,
                                                              const Tensor& plan, std::optional<Tensor> plan_backward,
                                                              std::optional<Tensor> sinks, int64_t retained_bytes,
                                                              StringHandle context, std::optional<double> scale,
                                                              double softcap, bool deterministic, bool max_logits) {
  const Text name(context);
  return collective(name, [&] {
    const auto f = make_reused<Forward>(ForwardArguments{q,
                                                         k,
                                                         v,
                                                         plan,
                                                         plan_backward,
                                                         sinks,
                                                         {name, scale, softcap, deterministic},
                                                         /*retain=*/retained_bytes != 0,
                                                         max_logits});
    require(retained_bytes == 0 || retained_bytes == f->slice.header().retained_bytes,
            "retained_bytes = ", retained_bytes, "; the plan says ", f->slice.header().retained_bytes,
            " on this rank; 0 keeps nothing");
    const auto ctx = std::exchange(f->context, nullptr);
    ctx->forward(f->slice, f->tensors(), f->scores, torch_threads(), f);
    return f->results();
  });
}

int64_t dispatch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& plan,
                 std::optional<Tensor> plan_backward, std::optional<Tensor> sinks, StringHandle context,
                 std::optional<double> scale, double softcap, bool deterministic, bool retain, bool max_logits) {
  const Text name(context);
  return collective(name, [&] {
    const auto f = make_reused<Forward>(ForwardArguments{
        q, k, v, plan, plan_backward, sinks, {name, scale, softcap, deterministic}, retain, max_logits});
    const auto ctx = std::exchange(f->context, nullptr);
    return static_cast<int64_t>(ctx->dispatch(f->slice, f->tensors(), f->scores, f));
  });
}

/// `core_attention_backward`, and `dispatch_backward`, which begins the step and has the same arguments.
template <Part kPart>
auto begin_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                    const Tensor& lse, const Tensor& plan, std::optional<Tensor> sinks, StringHandle context,
                    std::optional<double> scale, double softcap, bool deterministic, std::optional<Tensor> retained,
                    std::optional<Tensor> dlse) {
  const Text name(context);
  return collective(name, [&] {
    const auto b = make_reused<Backward>(
        BackwardArguments{dout, q, k, v, out, lse, plan, sinks, retained, dlse, {name, scale, softcap, deterministic}});
    const auto ctx = std::exchange(b->context, nullptr);
    if constexpr (kPart == Part::kDispatch) {
      return static_cast<int64_t>(ctx->dispatch(b->slice, b->tensors(), b->scores, torch_threads(), b));
    } else {
      ctx->backward(b->slice, b->tensors(), b->scores, torch_threads(), b);
      return std::tuple{b->dq, b->dk, b->dv};
    }
  });
}

void attend(int64_t step, StringHandle context) {
  const Text name(context);
  collective(name, [&] { runtime::find_context(name)->attend(static_cast<uint64_t>(step), torch_threads()); });
}

std::shared_ptr<Forward> collect_forward(int64_t step, std::string_view context) {
  const auto owner =
      runtime::find_context(context)->collect(static_cast<uint64_t>(step), plan::Phase::kForward, torch_threads());
  return std::static_pointer_cast<Forward>(owner);
}

std::tuple<Tensor, Tensor> collect(int64_t step, StringHandle context) {
  const Text name(context);
  return collective(name, [&] {
    const auto f = collect_forward(step, name);
    return std::tuple{f->out, f->lse};
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> collect_all(int64_t step, StringHandle context) {
  const Text name(context);
  return collective(name, [&] { return collect_forward(step, name)->results(); });
}

std::tuple<Tensor, Tensor, Tensor> collect_backward(int64_t step, StringHandle context) {
  const Text name(context);
  return collective(name, [&] {
    const auto owner =
        runtime::find_context(name)->collect(static_cast<uint64_t>(step), plan::Phase::kBackward, torch_threads());
    const auto b = std::static_pointer_cast<Backward>(owner);
    return std::tuple{b->dq, b->dk, b->dv};
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distca, m) {
  m.def(
      "core_attention(Tensor q, Tensor k, Tensor v, Tensor plan, Tensor? plan_backward=None, Tensor? sinks=None, *, "
      "str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False) -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "core_attention_all(Tensor q, Tensor k, Tensor v, Tensor plan, Tensor? plan_backward=None, "
      "Tensor? sinks=None, *, SymInt retained_bytes, str context=\"default\", float? scale=None, float softcap=0., "
      "bool deterministic=False, bool max_logits=False) -> "
      "(Tensor out, Tensor lse, Tensor retained, Tensor max_logits)");
  m.def(
      "core_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan, "
      "Tensor? sinks=None, *, str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False, "
      "Tensor? retained=None, Tensor? dlse=None) -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def(
      "dispatch(Tensor q, Tensor k, Tensor v, Tensor plan, Tensor? plan_backward=None, Tensor? sinks=None, *, "
      "str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False, bool retain=False, "
      "bool max_logits=False) -> int");
  m.def(
      "dispatch_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan, "
      "Tensor? sinks=None, *, str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False, "
      "Tensor? retained=None, Tensor? dlse=None) -> int");
  m.def("attend(int step, *, str context=\"default\") -> ()");
  m.def("collect(int step, *, str context=\"default\") -> (Tensor out, Tensor lse)");
  m.def(
      "collect_all(int step, *, str context=\"default\") -> "
      "(Tensor out, Tensor lse, Tensor retained, Tensor max_logits)");
  m.def("collect_backward(int step, *, str context=\"default\") -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(distca, CPU, m) {
  m.impl("core_attention", TORCH_BOX(&core_attention));
  m.impl("core_attention_all", TORCH_BOX(&core_attention_all));
  m.impl("core_attention_backward", TORCH_BOX(&begin_backward<Part::kWhole>));
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("dispatch_backward", TORCH_BOX(&begin_backward<Part::kDispatch>));
}

STABLE_TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  m.impl("core_attention", TORCH_BOX(&core_attention));
  m.impl("core_attention_all", TORCH_BOX(&core_attention_all));
  m.impl("core_attention_backward", TORCH_BOX(&begin_backward<Part::kWhole>));
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("dispatch_backward", TORCH_BOX(&begin_backward<Part::kDispatch>));
}

// No tensor among the arguments says where these run; the context knows it.
STABLE_TORCH_LIBRARY_IMPL(distca, CompositeExplicitAutograd, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("collect", TORCH_BOX(&collect));
  m.impl("collect_all", TORCH_BOX(&collect_all));
  m.impl("collect_backward", TORCH_BOX(&collect_backward));
}

}  // namespace distca::ops
