"""Ping-pong under DistributedDataParallel and FSDP2 gives the mean gradients of all ranks."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distca
from distca.integrations import hf  # noqa: F401
from support.groups import loopback_group, on_all_ranks
from support.halves import HEADS, Model, halves_for, one_after_the_other, plans_for, results, seeded
from support.ranks import launch
from support.torch_features import PING_PONG_TAKES_FSDP


def _gradients(wrapper: str, context: distca.Context) -> tuple[list[torch.Tensor], int]:
    """The gradients of ping-pong's second step, averaged over ranks by the wrapper, and the bytes that FSDP2 keeps
    whole.
    """
    model = seeded(Model)
    both = distca.PingPong(model)
    wrapped: torch.nn.Module = both
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(both)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(both if wrapper == "fsdp2 around" else model)
    halves = halves_for(plans_for(2), context)
    if wrapper == "fsdp2":  # recomputed layer by layer, with attention
        halves[1]["recompute"] = {}
    for half in halves:
        half["context"] = "default"
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        first, second = wrapped(*halves)
        (first.square().sum() + second.square().sum()).backward()
    grads = [p.grad.full_tensor() if wrapper != "ddp" else p.grad.clone() for p in model.parameters()]
    return grads, both.unsharded_bytes


def _wrapped() -> dict[str, tuple[list[torch.Tensor], int]]:
    with distca.init(transport="shm", max_tokens=256, heads=HEADS, timeout=60) as context:
        wrappers = ["ddp", "fsdp2", "fsdp2 around"] if PING_PONG_TAKES_FSDP else ["ddp"]
        return {wrapper: _gradients(wrapper, context) for wrapper in wrappers}


def test_gradients_under_a_wrapper_are_the_mean_over_ranks_of_those_without() -> None:
    plans = plans_for(2)

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        model = seeded(Model)
        results(one_after_the_other, model, halves_for(plans, context))
        return [p.grad.clone() for p in model.parameters()]

    with loopback_group(plans) as contexts:
        per_rank = on_all_ranks(contexts, work)
    expected = [(a + b) / 2 for a, b in zip(*per_rank, strict=True)]
    for rank in launch(_wrapped, ranks=2):
        for wrapper, (grads, whole) in rank.items():
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, expected, strict=True)), wrapper
            assert whole == (0 if wrapper == "ddp" else 4 * sum(g.numel() for g in expected)), wrapper
