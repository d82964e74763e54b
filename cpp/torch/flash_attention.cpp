// torch.ops.distca.attention_by_flash and its backward: distca.attention, computed by ATen's flash attention.
#include <torch/csrc/stable/library.h>

#include <limits>
#include <vector>

#include "torch/aten.h"
#include "torch/flash.h"

namespace distca::ops {
namespace {

using torch::headeronly::ScalarType;

struct Checked {
  HeadShape heads;
  std::vector<LocalTask> tasks;
  FlashOptions options;
};

Checked check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
              const std::optional<Tensor>& sinks, const LocalOptions& options) {
  Checked c;
  c.heads = heads_of(q, k, v);
  check_flash(q, c.heads, checked_softcap(options.softcap));
  if (sinks.has_value()) {
    check_sinks(*sinks, c.heads);
    check_device_of(q, *sinks, "sinks");
  }
  read_tasks(c.tasks, tasks, q.size(0), k.size(0), options.mask);
  c.options = {options.mask, scale_or_default(options.scale, c.heads)};
  return c;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_by_flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                              const std::optional<Tensor>& sinks, const LocalOptions& options) {
  return guarded([&] {
    const Checked c = check(q, k, v, tasks, sinks, options);
    const auto results = flash_forward(q, k, v, c.tasks, c.options);
    if (sinks.has_value()) add_sinks(std::get<0>(results), std::get<1>(results), *sinks);
    return results;
  });
}

std::tuple<Tensor, Tensor, Tensor> attention_by_flash_backward(const Tensor& dout_any, const Tensor& q, const Tensor& k,
                                                               const Tensor& v, const Tensor& out, const Tensor& lse,
                                                               const Tensor& tasks, const std::optional<Tensor>& sinks,
                                                               const LocalOptions& options,
                                                               const std::optional<Tensor>& dlse) {
  return guarded([&] {
    taken_gradient_of_lse(false, dlse);
    const Checked c = check(q, k, v, tasks, sinks, options);
    const Tensor dout = with_dense_rows(dout_any);
    check_like_out(dout, "dout", c.heads, q.size(0));
    check_like_out(out, "out", c.heads, q.size(0));
    scalars_of(lse, "lse");
    require(lse.size(0) == q.size(0) && lse.size(1) == c.heads.q_heads, "lse has shape ", shape_of(lse), "; [",
            q.size(0), ", ", c.heads.q_heads, "] is expected");
    for (const auto& [t, name] : {std::pair{&dout, "dout"}, {&out, "out"}, {&lse, "lse"}}) check_device_of(q, *t, name);
    auto [dq, dk, dv] = flash_backward(dout, q, k, v, out, lse, c.tasks, c.options);
    return std::tuple{dq, aten::cast(dk, k.scalar_type()), aten::cast(dv, v.scalar_type())};
  });
}

namespace {

std::tuple<Tensor, Tensor> by_flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& tasks,
                                    std::optional<Tensor> sinks, std::optional<double> scale, double softcap,
                                    bool deterministic, StringHandle mask, std::optional<int64_t> window) {
  const LocalOptions options = local_options(scale, softcap, deterministic, mask, window);
  return attention_by_flash(q, k, v, tasks, sinks, options);
}
std::tuple<Tensor, Tensor, Tensor> by_flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                     const Tensor& v, const Tensor& out, const Tensor& lse,
                                                     const Tensor& tasks, std::optional<Tensor> sinks,
                                                     std::optional<double> scale, double softcap, bool deterministic,
                                                     std::optional<Tensor> dlse, StringHandle mask,
                                                     std::optional<int64_t> window) {
  const LocalOptions options = local_options(scale, softcap, deterministic, mask, window);
  return attention_by_flash_backward(dout, q, k, v, out, lse, tasks, sinks, options, dlse);
}

/// The gradient of sinks, as on the CPU but for the order of the sum over rows.
Tensor sink_gradient_by_aten(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks,
                             std::optional<Tensor> dlse) {
  return guarded([&] {
    const auto fp32 = [](const Tensor& t) { return aten::cast(t, ScalarType::Float); };
    const int64_t dim[] = {2}, rows[] = {0};
    Tensor delta = torch::stable::sum(aten::multiply(fp32(out), fp32(dout)), dim);
    if (dlse.has_value()) delta = torch::stable::subtract(delta, *dlse);
    const Tensor share = aten::unary("aten::exp", torch::stable::subtract(sinks, lse));
    // Rows of no task have lse -inf and an infinite share. They add nothing, whatever their gradients are.
    const Tensor empty = aten::unary("aten::isneginf", lse), zero = torch::stable::new_zeros(lse, {});
    const Tensor terms = aten::tensor(aten::call("aten::where", "self", empty, zero, aten::multiply(share, delta))[0]);
    return aten::unary("aten::neg", torch::stable::sum(terms, rows));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(distca, m) {
  m.def(
      "attention_by_flash(Tensor q, Tensor k, Tensor v, Tensor tasks, Tensor? sinks=None, *, float? scale=None, "
      "float softcap=0., bool deterministic=False, str mask='causal', int? window=None) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_by_flash_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor tasks, "
      "Tensor? sinks=None, *, float? scale=None, float softcap=0., bool deterministic=False, Tensor? dlse=None, "
      "str mask='causal', int? window=None) -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def("sink_gradient_by_aten(Tensor dout, Tensor out, Tensor lse, Tensor sinks, Tensor? dlse=None) -> Tensor");
}

// These run on every device that has ATen's operator.
STABLE_TORCH_LIBRARY_IMPL(distca, CompositeExplicitAutograd, m) {
  m.impl("attention_by_flash", TORCH_BOX(&by_flash));
  m.impl("attention_by_flash_backward", TORCH_BOX(&by_flash_backward));
  m.impl("sink_gradient_by_aten", TORCH_BOX(&sink_gradient_by_aten));
}

STABLE_TORCH_LIBRARY_IMPL(distca, CUDA, m) { m.impl("sink_gradient", TORCH_BOX(&sink_gradient_by_aten)); }

}  // namespace distca::ops
