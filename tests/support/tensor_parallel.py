"""Tensor parallelism for the staged model: each process has some heads, and a part of the MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.staged_model import Layer, Model


class _Enter(torch.autograd.Function):
    """The same values; in backward the sum over the tensor group, whose processes have used different weights."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, context.group), None


class _Leave(torch.autograd.Function):
    """The sum over the tensor group; in backward the same values."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class _With(nn.Module):
    """One of the two functions above, with its group."""

    def __init__(self, function: type[torch.autograd.Function], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.function, self.group = function, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.group)


def divide(model: Model, group: dist.ProcessGroup) -> None:
    """Leaves this process of the tensor group its part of every layer."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for name, parameter in layer.named_parameters():
            parameter.data = parameter.data[_part(layer, name, rank, ranks)].clone()
        layer.heads = layer.heads.divided(ranks)
        layer.enter, layer.leave = _With(_Enter, group), _With(_Leave, group)


def _part(layer: Any, name: str, rank: int, ranks: int) -> tuple[slice, ...]:
    """The part of a parameter of the whole layer that a tensor rank has."""
    heads, whole = layer.heads, slice(None)
    kind = name.partition(".")[0]
    if kind in ("k", "v"):
        # Tensor ranks that share a key/value head each have a copy of it.
        first, count = rank * heads.kv // ranks, max(heads.kv // ranks, 1)
        return slice(first * heads.dim, (first + count) * heads.dim), whole
    if kind in ("q", "o"):
        width = heads.q * heads.dim // ranks
        own = slice(rank * width, (rank + 1) * width)
    elif kind in ("up", "gate", "down"):
        width = layer.down.in_features
        own = slice(rank * width // ranks, (rank + 1) * width // ranks)
    else:
        return (whole,)
    return (whole, own) if kind in ("o", "down") else (own, whole)


def of_whole(model: Model, whole: Model, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What a tensor rank adds to the gradients of the whole model: zeros where it has no part."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        place, kind, number, rest = whole.get_parameter(name), *[*name.split(".", 2), "", ""][:3]
        gradient = torch.zeros_like(place)
        if kind == "layers" and not rest.startswith("norms."):
            gradient[_part(whole.layers[int(number)], rest, rank, ranks)] = parameter.grad
        elif rank == 0:  # every tensor rank has it all
            gradient.copy_(parameter.grad)
        gradients[name] = gradient.detach()
    return gradients
