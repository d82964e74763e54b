"""Tensor parallelism by the plan that transformers has for a model, over DTensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from distca.apps.common.options import ConfigError
from distca.heads import Heads

try:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism as _apply
except ImportError:
    _apply = None

#: Modules that are whole on every tensor rank, and of whose gradient each rank has a part: norms of single heads.
#: transformers would add the parts up after every micro-batch, the sums of earlier ones again.
_PARTIAL = "replicated_with_grad_allreduce"
#: Experts, whose plans have these styles, are whole on every tensor rank: torch cannot save shards of two projections
#: that are packed into one in a form that another split can read.
_PACKED = ("packed_colwise", "packed_rowwise")
#: What the plans of transformers lack: gpt-oss has none, and that of Apertus forgets parameters.
_PLANS = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn": "local_params",
    },
    "apertus": {  # parameters of the activation, which each rank applies to its own columns
        "layers.*.mlp.act_fn.alpha_p": _PARTIAL,
        "layers.*.mlp.act_fn.alpha_n": _PARTIAL,
    },
}
_PLANS["apertus1p5_text"] = _PLANS["apertus"]
#: Norms of single heads. Models whose configuration may leave them out lack them in their plans.
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def tensor_plan(model: PreTrainedModel, ranks: int, heads: Heads) -> dict[str, str]:
    """The style of each module and parameter of the model that tensor ranks share, by its name.

    Args:
        model: the whole model, which may be on the meta device.
        ranks: number of tensor ranks.
        heads: head shape of the model's attention layers.

    Raises:
        ConfigError: there is no plan, or it does not fit the number of ranks.
    """
    if _apply is None or not hasattr(model, "_expand_parallel_plan"):
        raise ConfigError(
            f"--tensor needs transformers >= 5.23, whose plans use DTensor; this is {transformers.__version__}"
        )
    for count, what in ((heads.q, "query"), (heads.kv, "key/value")):
        if count % ranks:
            raise ConfigError(f"--tensor is {ranks}, must divide the model's {count} {what} heads")
    plan = dict(getattr(model, "tp_plan", None) or {})
    own = _PLANS.get(model.config.get_text_config().model_type, {})
    plan |= {f"{model.base_model_prefix}.{name}": style for name, style in own.items()}
    whole = tuple(name.rpartition(".")[0] + "." for name, style in plan.items() if style in _PACKED)
    plan = {name: style for name, style in plan.items() if not f"{name}.".startswith(whole)}
    if not any(style == "colwise" and "att" in name for name, style in plan.items()):
        raise ConfigError(
            f"--tensor is {ranks}, but transformers has no tensor-parallel plan for the attention of "
            f"{type(model).__name__}"
        )
    found = dict(model._expand_parallel_plan(plan))
    return found | _norms_of_heads(model, found, ranks, heads)


def _norms_of_heads(model: PreTrainedModel, plan: dict[str, str], ranks: int, heads: Heads) -> dict[str, str]:
    """The styles of the norms that the plan forgets beside shared projections."""
    found = {}
    for name, module in model.named_modules():
        attention, _, what = name.rpartition(".")
        if what not in _NORMS or plan.get(f"{attention}.q_proj") != "colwise":
            continue
        for parameter, weight in module.named_parameters(prefix=name, recurse=False):
            if parameter in plan:
                continue
            if weight.shape != (heads.dim,):
                raise ConfigError(
                    f"--tensor is {ranks}, but {parameter} of {type(model).__name__} is of shape "
                    f"{list(weight.shape)}, and not the same for every head of {heads.dim}"
                )
            found[parameter] = _PARTIAL
    return found


def share(model: PreTrainedModel, plan: dict[str, str], mesh: DeviceMesh) -> list[str]:
    """Leaves each tensor rank its shards of the model's parameters, as DTensors. All ranks have the whole ones before.

    Returns:
        The names of the parameters that are whole on every rank, and of whose gradient each rank has a part.
    """
    assert _apply is not None
    here = dict(model.named_modules()) | dict(model.named_parameters())
    mine = {name: style for name, style in plan.items() if name in here}
    _apply(model, mesh, {name: style for name, style in mine.items() if style != _PARTIAL})
    model.tie_weights()
    parameters = dict(model.named_parameters())
    return [name for name, style in mine.items() if style == _PARTIAL and name in parameters]


def add_up(gradients: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Adds the gradients of these parameters up over the processes of a group. Those that have none have zeros."""
    requests = []
    for one in gradients:
        if one.grad is None:
            one.grad = one.new_zeros(one.shape) if not isinstance(one, DTensor) else one.detach() * 0
        grad = one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad
        requests.append(dist.all_reduce(grad, group=group, async_op=True))
    for request in requests:
        request.wait()
