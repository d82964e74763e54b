"""torchtitan's debug models on two ranks, and beside them its own attention of one process in float64."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
import torchtitan.models
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import utils as titan_utils

import distca
from distca.integrations.torchtitan import BatchPlan, heads_of, windows_of
from support.groups import loopback_group, on_all_ranks

#: The lengths of the documents in each of the two rows of each rank.
LENGTHS = [[[256], [256]], [[40] * 5 + [56], [1, 100, 155]]]
ROWS, COLUMNS = 2, 256
NOT_MODELS = ("common", "utils")


class Result(NamedTuple):
    """What one optimizer step needs: the loss, and the gradient of each parameter."""

    loss: float
    grads: dict[str, torch.Tensor]


@contextmanager
def in_float32() -> Iterator[None]:
    """Keeps experts in float32, which torchtitan casts to bfloat16. Leaves out types of meshes that are not here."""
    with (
        mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor),
        mock.patch.object(titan_utils, "_spmd_backend", "partial_dtensor"),
    ):
        yield


def model_packages() -> list[str]:
    """The names of all models of the installed torchtitan."""
    found = (module.name for module in pkgutil.iter_modules(torchtitan.models.__path__))
    return [name for name in found if name not in NOT_MODELS]


@functools.cache
def flavors(package: str) -> dict[str, Any]:
    """By name, what makes a configuration of that model."""
    module = importlib.import_module(f"torchtitan.models.{package}")
    return next(value for name, value in vars(module).items() if name.endswith("_configs") and isinstance(value, dict))


def config_of(package: str, flavor: str, layers: int = 2, attention: str = "varlen", **options: Any) -> Any:
    """A configuration with its first few layers only."""
    config = flavors(package)[flavor](attn_backend=attention, **options)
    config.layers = config.layers[:layers]
    return config


def replaced(config: Any) -> list[str]:
    """Replaces the attention of a configuration by distca's. Returns torchtitan's lines about it."""
    return apply_overrides(OverrideConfig(imports=["distca.integrations.torchtitan.use_distca"]), config)


def built(config: Any) -> Any:
    """The model, with the same weights for every configuration of that model."""
    torch.manual_seed(5)
    model = config.build()
    model.init_states()
    return model


def positions_of(rank: int) -> torch.Tensor:
    """``[B, L]``, as torchtitan's loaders count them."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS[rank]])


def layout() -> distca.Layout:
    return distca.Layout.from_documents([list(itertools.chain(*rows)) for rows in LENGTHS])


def step(model: Any, rank: int, masks: Any = None) -> Result:
    """Forward and backward on a rank's batch. The loss is a share of the mean over both ranks."""
    generator = torch.Generator().manual_seed(rank)
    tokens, labels = torch.randint(0, 2000, (2, ROWS, COLUMNS), generator=generator)
    positions = positions_of(rank)
    masks = model.get_attention_masks(positions) if masks is None else masks
    logits = model(tokens, positions=positions, attention_masks=masks)
    losses = [
        F.cross_entropy(of_depth.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        for of_depth in (logits if isinstance(logits, list) else [logits])
    ]
    loss = sum(losses) / (2 * ROWS * COLUMNS)
    loss.backward()
    return Result(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def own_attention(model: Any) -> Any:
    """torchtitan's varlen attention runs on CUDA only. This computes what it says, in float64."""
    for module in model.modules():
        if type(module).__name__ == "VarlenAttention":
            module.forward = functools.partial(_own_attention, module.window_size)
    return model


def _own_attention(
    window_size: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: Any = None,
) -> torch.Tensor:
    of_documents = attention_masks.cu_seq_q.diff().tolist()
    outs, lses = [], []
    for parts in zip(*(x.flatten(0, 1).double().split(of_documents) for x in (q, k, v)), strict=True):
        queries, keys, values = (part.transpose(0, 1) for part in parts)
        group = len(queries) // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        logits = queries @ keys.mT * (scale or q.shape[-1] ** -0.5)
        before = torch.arange(len(parts[0]))[:, None] - torch.arange(len(parts[0]))
        seen = (before >= 0) & ((before <= window_size[0]) | (window_size[0] < 0))
        logits = logits.masked_fill(~seen, -torch.inf)
        outs.append((logits.softmax(-1) @ values).transpose(0, 1))
        lses.append(logits.logsumexp(-1).T)
    out = torch.cat(outs).view(*q.shape[:3], v.shape[-1]).to(q.dtype)
    return out if out_transform is None else out_transform(out, torch.cat(lses).view(*q.shape[:3]).to(q.dtype))


def reference(config: Any) -> Result:
    """Both ranks' batches one after the other, with torchtitan's own attention."""
    model = own_attention(built(config))
    with in_float32():
        loss = sum(step(model, rank).loss for rank in range(2))
    return Result(loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def on_two_ranks(config: Any, **options: Any) -> tuple[Result, distca.Plans, int]:
    """Loss and gradients of two ranks together, the plans, and the steps of a rank."""
    plans = distca.plans(layout(), heads_of(config, torch.float32), windows=windows_of(config), **options)
    replaced(config)
    models = [built(config)]
    models.append(copy.deepcopy(models[0]))

    def work(rank: int, context: distca.Context) -> tuple[Result, int]:
        result = step(models[rank], rank, BatchPlan(plans.for_rank(rank), context))
        return result, context.step

    with in_float32(), loopback_group(list(plans.values()), timeout=60.0) as contexts:
        (first, steps), (second, _) = on_all_ranks(contexts, work)
    grads = {name: first.grads[name] + second.grads[name] for name in first.grads}
    return Result(first.loss + second.loss, grads), plans, steps


def worst_gradient(ours: Result, expected: Result) -> float:
    """The largest difference of a gradient, relative to the largest entry of that gradient."""
    assert ours.grads.keys() == expected.grads.keys()
    return max(
        ((ours.grads[name] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
        for name, wanted in expected.grads.items()
    )
