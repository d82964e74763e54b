"""What a plan makes every home compute and send in forward and in backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from distca.planner.layout import Layout
from distca.planner.plan import Plan
from distca.simulator.device import Device
from distca.simulator.network import Traffic


@dataclasses.dataclass(frozen=True)
class RingStep:
    """A step of a ring: a home computes with the keys that it has, and passes keys on meanwhile.

    Attributes:
        seconds: ``[homes]`` of computation.
        passed: the keys, or their gradients, that travel meanwhile. The next step waits for them.
    """

    seconds: torch.Tensor
    passed: Traffic


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Attention of a layer in one phase, as planned. All tensors are ``[homes]`` in float64.

    Attributes:
        at_once: seconds of the tasks whose rows are all on their server.
        later: seconds of the tasks that need rows of other homes.
        inward: rows that go to servers.
        homeward: results that go home.
        ring: the steps of a ring, which come after the tasks of `at_once`.
        even: seconds of each home if attention were even; None: all homes have an equal share of it.
    """

    at_once: torch.Tensor
    later: torch.Tensor
    inward: Traffic
    homeward: Traffic
    ring: Sequence[RingStep] = ()
    even: torch.Tensor | None = None

    @property
    def evenly(self) -> torch.Tensor:
        """Seconds of each home if attention were even."""
        if self.even is not None:
            return self.even
        return torch.full_like(self.at_once, float((self.at_once + self.later).mean()))


@dataclasses.dataclass(frozen=True)
class StageWork:
    """Attention of a layer in one phase on the homes of one stage, before it has its place among all homes.

    Attributes:
        seconds: ``[homes]`` of computation, after the rows of `inward` have come; float64.
        inward: ``[homes, homes]`` bytes from home to home before it; None: none.
        homeward: ``[homes, homes]`` bytes after it; None: none.
        ring: for each step of a ring its ``[homes]`` seconds and the ``[homes, homes]`` bytes that travel meanwhile.
            The first begins after the rows of `inward` have come.
    """

    seconds: torch.Tensor
    inward: torch.Tensor | None = None
    homeward: torch.Tensor | None = None
    ring: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    @property
    def computed(self) -> torch.Tensor:
        """All seconds of computation, ``[homes]``."""
        return torch.stack([self.seconds, *(took for took, _ in self.ring)]).sum(0)

    def placed(self, stage: Sequence[int], num_homes: int, per_node: int, even: float) -> AttentionWork:
        """This work on the homes of a stage, and nothing on the others. `even` is what each would have evenly."""
        index = torch.tensor(stage)

        def seconds(of_stage: torch.Tensor) -> torch.Tensor:
            return torch.zeros(num_homes, dtype=torch.float64).index_copy(0, index, of_stage)

        def traffic(of_stage: torch.Tensor | None) -> Traffic:
            matrix = torch.zeros(num_homes, num_homes, dtype=torch.float64)
            if of_stage is not None:
                matrix[index.unsqueeze(1), index] = of_stage
            return Traffic.of(matrix, per_node)

        computed, none = seconds(self.seconds), torch.zeros(num_homes, dtype=torch.float64)
        ring = [RingStep(seconds(took), traffic(passed)) for took, passed in self.ring]
        at_once, later = (computed, none) if self.inward is None else (none, computed)
        evenly = seconds(torch.full_like(self.seconds, even))
        return AttentionWork(at_once, later, traffic(self.inward), traffic(self.homeward), ring, evenly)


class PieceTimes:
    """Seconds of pieces of attention, of all query heads of a tensor rank, in one phase.

    Args:
        device: what computes.
        phase: ``"forward"`` or ``"backward"``.
        q_heads: query heads.
    """

    def __init__(self, device: Device, phase: str, q_heads: int) -> None:
        model = device.cost(phase)
        assert model.unit_ns is not None
        self._cost, self._unit = model.core.cost, model.unit_ns * 1e-9 * q_heads

    @functools.cache  # noqa: B019 - lives as long as one step is prepared
    def seconds(self, rows: int, keys: int, *, causal: bool) -> float:
        """Seconds of so many rows that see so many keys: all of them, or causally the last ones up to their own."""
        if causal:
            return self._cost(0, 0, keys, keys - rows, keys) * self._unit
        return self._cost(1, 0, keys, 0, rows) * self._unit


def attention_work(plan: Plan, phase: str, device: Device, per_node: int) -> AttentionWork:
    """What a plan's tasks and transfers are in ``"forward"`` or ``"backward"``."""
    homes = plan.layout.num_ranks
    at_once, later = attention_seconds(plan, phase, device)
    traffic = {}
    for message, source, target, num_bytes in _messages(plan):
        if message not in traffic:
            traffic[message] = torch.zeros(homes * homes, dtype=torch.float64)
        traffic[message].index_add_(0, source * homes + target, num_bytes)
    nothing = torch.zeros(homes * homes, dtype=torch.float64)
    inward, homeward = (
        Traffic.of(traffic.get(f"{phase}_{direction}", nothing).reshape(homes, homes), per_node)
        for direction in ("in", "out")
    )
    return AttentionWork(at_once, later, inward, homeward)


def attention_seconds(plan: Plan, phase: str, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seconds of each server's tasks: of those that need only its own rows, and of the others."""
    model = device.cost(phase)
    assert model.unit_ns is not None
    cost, unit = model.core.cost, model.unit_ns * 1e-9
    share = plan.heads.q // plan.heads.kv
    lengths, owners = plan.layout.document_lengths, _owners(plan.layout)
    seconds = [[0.0] * plan.layout.num_ranks for _ in range(2)]
    for task in plan.tasks:
        whole = owners[task.document]
        if len(whole) == 1:
            remote = whole[0][2] != task.server
        else:
            first, last = min(task.q_begin, task.kv_begin), max(task.q_end, task.kv_end)
            remote = any(rank != task.server for begin, end, rank in whole if begin < last and first < end)
        took = cost(0, 0, lengths[task.document], task.q_begin, task.q_end) * unit
        seconds[remote][task.server] += took * share * (task.kv_head_end - task.kv_head_begin)
    at_once, later = (torch.tensor(of, dtype=torch.float64) for of in seconds)
    return at_once, later


def _owners(layout: Layout) -> list[list[tuple[int, int, int]]]:
    """For each document the rows [begin, end) of each rank."""
    owners: list[list[tuple[int, int, int]]] = [[] for _ in layout.document_lengths]
    for rank in range(layout.num_ranks):
        for document, begin, end in layout.segments(rank):
            if document >= 0:
                owners[document].append((begin, end, rank))
    return owners


def _messages(plan: Plan) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sources, targets and bytes of all transfers of each message."""
    by_message: dict[str, list[tuple[int, int, int]]] = {}
    for transfer in plan.transfers:
        by_message.setdefault(transfer.message, []).append((transfer.source, transfer.target, transfer.bytes))
    for message, rows in by_message.items():
        source, target, num_bytes = torch.tensor(rows, dtype=torch.int64).T
        yield message, source, target, num_bytes.double()
