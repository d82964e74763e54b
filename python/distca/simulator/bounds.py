"""Least time and memory of a set-up, whatever the strategy, from its tokens alone. Nothing is planned for them."""

from __future__ import annotations

import dataclasses

from distca.simulator.case import Case
from distca.simulator.dense import Part
from distca.simulator.device import Device, Gemm, PartTime
from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.setup import Cluster

_ROUNDING = 1e-6  # costs of tasks are whole units
_WHOLE_RATE = 1024  # a rate of 1 in cost models


def least_memory(case: Case, *, keeps_rows: bool = True) -> float:
    """Bytes that some rank needs: weights and optimizer, and the activations of the mean rows if they are kept."""
    shape = case.parallelism
    if not keeps_rows:
        return case.state_bytes
    rows = sum(case.lengths) / (shape.micro_batches * shape.homes)
    return case.state_bytes + case.activation_bytes(int(rows), min(shape.micro_batches, shape.pipeline))


def least_work(case: Case, at_best: Cluster) -> float:
    """Seconds that the mean rank computes and exchanges with its tensor group, at the best rates, but for the end.

    The slowest rank has at least the mean.

    Args:
        case: the set-up.
        at_best: its cluster as `optimistic` makes it.
    """
    shape, model = case.parallelism, case.model
    lengths = case.lengths
    mean = dataclasses.replace(case, cluster=at_best, parallelism=dataclasses.replace(shape, pipeline=1))
    dense = mean.dense([sum(lengths)])
    bandwidth = at_best.inside.bandwidth

    def seconds(*parts: Part) -> float:
        return sum(float(part.seconds[0] + part.collective[0] / bandwidth) for part in parts)

    forward = seconds(dense.before, dense.after)
    backward = seconds(dense.before.backward, dense.after.backward)
    ends = seconds(dense.embedding, dense.head, dense.embedding.backward, dense.head.backward)
    pairs = sum(n * (n + 1) // 2 for n in lengths) * model.q_heads / shape.tensor
    rows = sum(lengths) * model.q_heads / shape.tensor
    forward += _least_attention(case.cluster.device, "forward", pairs, rows)
    backward += _least_attention(case.cluster.device, "backward", pairs, rows)
    again = seconds(dense.before, dense.again) if shape.save_attention else forward if shape.recompute else 0.0
    layer = forward + again + backward
    everything = (layer * model.layers + ends) / (shape.homes * shape.pipeline)
    return everything * (1 - _ROUNDING)


def end_seconds(case: Case) -> float:
    """Seconds of the end of a step, when all ranks have come to it: gradients that are not sharded, and optimizer."""
    machine = Machine(Network(case.cluster, case.parallelism.tensor), case.cluster.device)
    case.finish(machine)
    return float(machine.now.max())


def _least_attention(device: Device, phase: str, pairs: float, rows: float) -> float:
    """Seconds of so many visible pairs and rows of all heads, at the best rate of any size."""
    cost = device.cost(phase)
    assert cost.unit_ns is not None
    rate = min((rate for line in cost.rates for rate in line), default=_WHOLE_RATE) / _WHOLE_RATE
    return (cost.per_pair * rate * pairs + cost.per_row * rows) * cost.unit_ns * 1e-9


def optimistic(cluster: Cluster) -> Cluster:
    """The cluster with each rate at its best, and without overheads. The time of dense parts then grows with rows."""
    return dataclasses.replace(cluster, device=_at_its_best(cluster.device))


def _at_its_best(device: Device) -> Device:
    shapes = {(one.n, one.k) for one in device.gemms}
    gemms = []
    for n, k in sorted(shapes):
        rates = [one.rates for one in device.gemms if (one.n, one.k) == (n, k)]
        forward, backward = (max(of) / 1e12 for of in zip(*rates, strict=True))
        gemms.append(Gemm(1, n, k, forward, backward))
    parts = []
    for name in sorted({one.part for one in device.parts}):
        points = [one for one in device.parts if one.part == name]
        forward, backward = (
            min(getattr(one, phase) / one.numbers for one in points) for phase in ("forward", "backward")
        )
        parts.append(PartTime(name, 1, forward, backward))
    return dataclasses.replace(
        device,
        gemms=tuple(gemms),
        parts=tuple(parts),
        launch=0.0,
        layer_overhead=0.0,
        recompute_overhead=0.0,
        call_overhead=0.0,
    )
