"""How much longer ranks of this machine compute while the others compute as well: they share its memory."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist

from distca.apps.profile.layers import Piece, Tensors, decoder_layers, gradients_of, timed_once
from distca.ops import attention
from distca.simulator.setup import Model

#: Numbers of the input of a layer. What a few layers save does not fit into caches.
NUMBERS = 3 << 18
NAME = "distca_profile"


def contention(models: Iterable[Model], rounds: int) -> float:
    """How many times as long layers take while all ranks compute them, over one rank at a time.

    All ranks call it together, and all have the same result: the mean of the models, at least 1.
    """
    return max(1.0, statistics.mean(_of_model(model, rounds) for model in models))


def _of_model(model: Model, rounds: int) -> float:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    layers = decoder_layers(model, lambda forward: forward(), max(1, NUMBERS // model.hidden), NAME)
    gradients, every = gradients_of(layers), range(dist.get_world_size())
    slowed = [
        _seconds(layers, gradients, every) / _seconds(layers, gradients, [number % len(every)])
        for number in range(rounds + 1)
    ]
    return statistics.median(slowed[1:])


def _attention(
    module: torch.nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """distca's kernel as transformers calls it, for one causal document."""
    count = queries.shape[2]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (queries, keys, values))
    out, _lse = attention(q, k, v, torch.tensor([(0, count, 0, count)]))
    return out.unsqueeze(0), None


def _seconds(layers: list[Piece], gradients: list[Tensors], ranks: Collection[int]) -> float:
    """The mean of the seconds in which these ranks run the layers forward and backward. The others wait."""
    took = torch.zeros(())
    dist.barrier()
    if dist.get_rank() in ranks:
        took += sum(timed_once(layers, gradients))
    dist.all_reduce(took)
    return float(took) / len(ranks)
