"""What it takes to gather and reduce the weights of FSDP's layers on ranks of this machine.

It is what layers take more than layers whose weights are whole: the collectives, beside which other ranks compute, and
what FSDP copies and does on the host for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distca.apps.profile.layers import DEPTH, llama_config
from distca.simulator.setup import Model

#: Rows of a layer's input.
ROWS = 512


def sharded_weights(models: Iterable[Model], rounds: int) -> list[dict[str, Any]]:
    """The rates of FSDP's gathers and reductions by the bytes that each rank sends in one, for layers of these models.

    All ranks call it together.
    """
    return [rate for model in models for rate in _of_model(model, rounds)]


def _of_model(model: Model, rounds: int) -> Iterator[dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    whole, sharded = _Layers(model), _Layers(model)
    num_bytes = sum(4 * weight.numel() for weight in whole.parameters()) // DEPTH
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    more = [
        [after - before for before, after in zip(whole.seconds(), sharded.seconds(), strict=True)]
        for _ in range(rounds + 1)
    ]
    forward, backward = (statistics.median(of_phase) / DEPTH for of_phase in zip(*more[1:], strict=True))
    sent = num_bytes * (ranks - 1) // ranks
    # Forward gathers weights, backward gathers them again and reduces gradients.
    for what, seconds in (("fsdp_gather", forward), ("fsdp_reduce", backward - forward)):
        yield {"what": what, "bytes": sent, "bandwidth": sent / max(seconds, 1e-6)}


class _Layers(torch.nn.Module):
    """Decoder layers one after another."""

    def __init__(self, model: Model) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        super().__init__()
        config = llama_config(model, "sdpa")
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(config, 0) for _ in range(DEPTH))
        self._input = torch.randn(1, ROWS, model.hidden)
        self._places = tuple(torch.randn(2, 1, ROWS, model.head_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's output."""
        for layer in self.layers:
            x = layer(x, position_embeddings=self._places)
        return x

    def seconds(self) -> tuple[float, float]:
        """Seconds of forward and of backward, which all ranks begin together."""
        dist.barrier()
        begin = time.perf_counter()
        total = self(self._input).sum()
        middle = time.perf_counter()
        total.backward()
        end = time.perf_counter()
        self.zero_grad()
        return middle - begin, end - middle
