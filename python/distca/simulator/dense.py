"""Times of what is not attention: matrix products, what memory binds, and the collectives of tensor parallelism."""

from __future__ import annotations

import dataclasses

import torch

from distca.simulator.setup import Cluster, Model, Parallelism

#: Bytes of a number in bfloat16, in which weights and activations are.
HALF = 2
#: Bytes that an optimizer step reads and writes for a weight: gradient, two moments, fp32 copy, and the weight.
_OPTIMIZER_TRAFFIC = 4 + 2 * 4 * 3 + 2


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer on every home, each ``[ranks]`` in float64.

    Attributes:
        seconds: computation.
        collective: bytes that each tensor rank sends and receives before it.
        steps: how many steps of a ring these are.
    """

    seconds: torch.Tensor
    collective: torch.Tensor
    steps: int

    def twice(self) -> Part:
        """Backward: twice the computation, and as many bytes."""
        return Part(2 * self.seconds, self.collective, self.steps)


@dataclasses.dataclass(frozen=True)
class Dense:
    """The parts of a layer for some rows on every home.

    Attributes:
        before: up to attention: norm, projections of queries, keys and values, RoPE.
        after: from attention on: output projection, norm, MLP.
        head: norm, logits and loss.
    """

    before: Part
    after: Part
    head: Part


def dense_of(rows: list[int], cluster: Cluster, model: Model, parallelism: Parallelism) -> Dense:
    """The parts of a layer, for each home's rows. Norms and residuals are split over the tensor ranks as well."""
    device, tensor = cluster.device, parallelism.tensor
    attention = model.head_dim * (model.q_heads + 2 * max(model.kv_heads, tensor)) // tensor
    own, inner = model.head_dim * model.q_heads // tensor, model.intermediate // tensor
    hidden, words = model.hidden, -(-model.vocabulary // tensor)

    def bound(numbers: float, kernels: int) -> float:
        return numbers * HALF / device.memory_bandwidth + kernels * device.launch

    times: dict[int, tuple[float, float, float]] = {0: (0.0, 0.0, 0.0)}
    for n in set(rows) - {0}:
        before = device.gemm_seconds(n, attention, hidden) + bound(n * (2 * hidden / tensor + 2 * attention), 2)
        after = device.gemm_seconds(n, hidden, own) + device.gemm_seconds(n, 2 * inner, hidden)
        after += device.gemm_seconds(n, hidden, inner) + bound(n * (8 * hidden / tensor + 3 * inner), 4)
        head = device.gemm_seconds(n, words, hidden) + bound(n * (2 * hidden / tensor + 2 * words), 2)
        times[n] = before, after, head
    columns = torch.tensor([times[n] for n in rows], dtype=torch.float64).reshape(-1, 3).T
    ring = torch.tensor(rows, dtype=torch.float64) * hidden * HALF * (tensor - 1) / tensor
    steps = tensor - 1
    return Dense(
        Part(columns[0], ring, steps),
        Part(columns[1], 3 * ring, 3 * steps),
        Part(columns[2], torch.zeros_like(ring), 0),
    )


def optimizer_seconds(weights: float, cluster: Cluster) -> float:
    """Seconds of an optimizer step on so many weights."""
    return weights * _OPTIMIZER_TRAFFIC / cluster.device.memory_bandwidth
