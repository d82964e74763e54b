// torch.ops.distca.core_attention and its backward: one collective step each.
#include <torch/csrc/stable/library.h>

#include "runtime/context.h"
#include "torch/tensors.h"

namespace distca::ops {
namespace {

std::tuple<Tensor, Tensor> core_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& plan,
                                          std::optional<Tensor> plan_backward, std::optional<Tensor> sinks,
                                          std::string context, std::optional<double> scale, double softcap,
                                          bool /*deterministic: the CPU kernel always is*/) {
  return guarded([&] {
    const HeadShape heads = heads_of(q, k, v);
    require(q.size(0) == k.size(0), "q ", shape_of(q), " and k ", shape_of(k), " have different lengths");
    const auto ctx = runtime::find_context(context);
    const plan::SliceView slice = ctx->accept(words_of(plan, "plan"), heads, q.size(0));
    if (plan_backward) ctx->accept(words_of(*plan_backward, "plan_backward"), heads, q.size(0));
    const runtime::ScoreOptions scores{scale_or_default(scale, heads), checked_softcap(softcap),
                                       sinks_of(sinks, heads)};
    Tensor out = empty_rows(q, q.size(0), heads.q_heads, heads.v_dim);
    Tensor lse = empty_scalars(q, q.size(0), heads.q_heads);
    ctx->forward(slice,
                 {rows_of(q, "q"), rows_of(k, "k"), rows_of(v, "v"), rows_of(out, "out"), scalars_of(lse, "lse")},
                 scores, torch_threads());
    return std::tuple{out, lse};
  });
}

std::tuple<Tensor, Tensor, Tensor> core_attention_backward(const Tensor& dout_any, const Tensor& q, const Tensor& k,
                                                           const Tensor& v, const Tensor& out, const Tensor& lse,
                                                           const Tensor& plan, std::optional<Tensor> sinks,
                                                           std::string context, std::optional<double> scale,
                                                           double softcap, bool /*deterministic*/) {
  return guarded([&] {
    const HeadShape heads = heads_of(q, k, v);
    const int64_t rows = q.size(0);
    const Tensor dout = with_dense_rows(dout_any);
    check_like_out(dout, "dout", heads, rows);
    check_like_out(out, "out", heads, rows);
    const RowView lse_rows = scalars_of(lse, "lse");
    require(k.size(0) == rows && lse.size(0) == rows && lse.size(1) == heads.q_heads,
            "q, k, v, out and lse have different lengths or head counts");
    const auto ctx = runtime::find_context(context);
    const plan::SliceView slice = ctx->accept(words_of(plan, "plan"), heads, rows);
    const runtime::ScoreOptions scores{scale_or_default(scale, heads), checked_softcap(softcap),
                                       sinks_of(sinks, heads)};
    Tensor dq = empty_rows(q, rows, heads.q_heads, heads.dim);
    Tensor dk = empty_rows(k, rows, heads.kv_heads, heads.dim);
    Tensor dv = empty_rows(v, rows, heads.kv_heads, heads.v_dim);
    ctx->backward(slice,
                  {rows_of(q, "q"), rows_of(k, "k"), rows_of(v, "v"), rows_of(out, "out"), lse_rows,
                   rows_of(dout, "dout"), rows_of(dq, "dq"), rows_of(dk, "dk"), rows_of(dv, "dv")},
                  scores, torch_threads());
    return std::tuple{dq, dk, dv};
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distca, m) {
  m.def(
      "core_attention(Tensor q, Tensor k, Tensor v, Tensor plan, Tensor? plan_backward=None, Tensor? sinks=None, *, "
      "str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False) -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "core_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan, "
      "Tensor? sinks=None, *, str context=\"default\", float? scale=None, float softcap=0., bool deterministic=False) "
      "-> "
      "(Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(distca, CPU, m) {
  m.impl("core_attention", TORCH_BOX(&core_attention));
  m.impl("core_attention_backward", TORCH_BOX(&core_attention_backward));
}

}  // namespace distca::ops
