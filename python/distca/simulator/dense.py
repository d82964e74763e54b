"""Times of what is not attention: matrix products, what memory binds, and the collectives of tensor parallelism."""

from __future__ import annotations

import dataclasses

import torch

from distca.simulator.device import Seconds
from distca.simulator.setup import Cluster, Model, Parallelism


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a layer on every home, each ``[ranks]`` in float64.

    Attributes:
        seconds: computation.
        backward_seconds: computation of its backward.
        collective: bytes that each tensor rank sends and receives before it, in forward and in backward.
        steps: how many steps of a ring these are.
    """

    seconds: torch.Tensor
    backward_seconds: torch.Tensor
    collective: torch.Tensor
    steps: int

    @property
    def backward(self) -> Part:
        """Its backward as a part."""
        return dataclasses.replace(self, seconds=self.backward_seconds)


@dataclasses.dataclass(frozen=True)
class Dense:
    """The parts of a layer for some rows on every home.

    Attributes:
        embedding: the look-up of the model's input.
        before: up to attention: norm, projections of queries, keys and values, RoPE.
        after: from attention on: output projection, norm, MLP.
        again: of that what is run again for backward: all that comes before the last product.
        head: norm, logits and loss.
    """

    embedding: Part
    before: Part
    after: Part
    again: Part
    head: Part


def dense_of(rows: list[int], cluster: Cluster, model: Model, parallelism: Parallelism) -> Dense:
    """The parts of a layer, for each home's rows. Norms and residuals are split over the tensor ranks as well."""
    tensor = parallelism.tensor
    times = {n: _seconds(n, cluster, model, tensor) for n in set(rows)}
    columns = torch.tensor([times[n] for n in rows], dtype=torch.float64).reshape(-1, 5, 2).permute(1, 2, 0)
    ring = torch.tensor(rows, dtype=torch.float64) * model.hidden * model.number_bytes * (tensor - 1) / tensor
    steps = tensor - 1
    none = torch.zeros_like(ring)
    return Dense(
        Part(columns[0, 0], columns[0, 1], none, 0),
        Part(columns[1, 0], columns[1, 1], ring, steps),
        Part(columns[2, 0], columns[2, 1], 3 * ring, 3 * steps),
        Part(columns[3, 0], columns[3, 1], 2 * ring, 2 * steps),
        Part(columns[4, 0], columns[4, 1], none, 0),
    )


def _seconds(n: int, cluster: Cluster, model: Model, tensor: int) -> tuple[Seconds, ...]:
    """Seconds of the parts of a layer for n rows on a tensor rank."""
    if n == 0:
        return (Seconds(0.0, 0.0),) * 5
    device, hidden, inner = cluster.device, model.hidden, model.intermediate // tensor
    queries = model.head_dim * model.q_heads // tensor
    keys = model.head_dim * max(model.kv_heads, tensor) // tensor
    words = -(-model.vocabulary // tensor)

    def products(*shapes: tuple[int, int]) -> Seconds:
        return sum((device.product(n, *shape) for shape in shapes), Seconds(0.0, 0.0))

    def part(name: str, width: float, passes: float) -> Seconds:
        """A part on so many numbers a row, each of which is read or written so many times."""
        return device.part(name, n * width, n * width * passes * model.number_bytes)

    norm, residual = part("norm", hidden / tensor, 2), part("residual", hidden / tensor, 3)
    # RoPE turns queries and keys; where no table says more, its kernel passes over the values as well.
    rotary = device.part("rotary", n * (queries + keys), 2 * n * (queries + 2 * keys) * model.number_bytes)
    overhead = Seconds(device.layer_overhead / 2, device.layer_overhead / 2)
    before = products((queries, hidden), (keys, hidden), (keys, hidden)) + norm + rotary + overhead
    again = products((hidden, queries), (inner, hidden), (inner, hidden))
    again = again + norm + residual + part("activation", inner, 3) + overhead
    after = again + products((hidden, inner)) + residual
    again_in_backward = again + Seconds(device.recompute_overhead, 0.0)
    # In backward, gradients come together where three projections, two of the MLP, or a residual read the same.
    sums = part("sum", hidden / tensor, 0).forward
    before, after = before + Seconds(0.0, 3 * sums), after + Seconds(0.0, 2 * sums)
    head = products((words, hidden)) + norm + part("loss", words, 2)
    return part("embedding", hidden / tensor, 0), before, after, again_in_backward, head


def optimizer_seconds(weights: float, cluster: Cluster, model: Model) -> float:
    """Seconds of an optimizer step on so many weights: gradient (fp32), two moments, fp32 copy, and the weight."""
    return cluster.device.part("optimizer", weights, weights * (4 + 2 * 4 * 3 + model.number_bytes)).forward
