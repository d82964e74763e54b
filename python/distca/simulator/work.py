"""What a plan makes every home compute and send in forward and in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from distca.planner.layout import Layout
from distca.planner.plan import Plan
from distca.simulator.device import Device
from distca.simulator.network import Traffic


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Attention of a layer in one phase, as planned. All tensors are ``[homes]`` in float64.

    Attributes:
        at_once: seconds of the tasks whose rows are all on their server.
        later: seconds of the tasks that need rows of other homes.
        inward: rows that go to servers.
        homeward: results that go home.
        even: seconds of each home if attention were even; None: all homes have an equal share of it.
    """

    at_once: torch.Tensor
    later: torch.Tensor
    inward: Traffic
    homeward: Traffic
    even: torch.Tensor | None = None

    @property
    def evenly(self) -> torch.Tensor:
        """Seconds of each home if attention were even."""
        if self.even is not None:
            return self.even
        return torch.full_like(self.at_once, float((self.at_once + self.later).mean()))


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
