"""What a plan makes every home compute and send in forward and in backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

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
class Round:
    """What servers compute when the rows of a round have come.

    Attributes:
        seconds: ``[homes]`` of computation.
        inward, homeward: the rows of the round, and the results that go home after it.
    """

    seconds: torch.Tensor
    inward: Traffic
    homeward: Traffic


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Attention of a layer in one phase, as planned. All tensors are ``[homes]`` in float64.

    Attributes:
        at_once: seconds of the tasks whose rows are all on their server.
        later: seconds of the tasks that need rows of other homes.
        inward: rows that go to servers.
        homeward: results that go home.
        rounds: `later`, `inward` and `homeward` by rounds; empty if all is one round.
        ring: the steps of a ring, which come after the tasks of `at_once`.
        even: seconds of each home if attention were even; None: all homes have an equal share of it.
    """

    at_once: torch.Tensor
    later: torch.Tensor
    inward: Traffic
    homeward: Traffic
    ring: Sequence[RingStep] = ()
    rounds: Sequence[Round] = ()
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
        return AttentionWork(at_once, later, traffic(self.inward), traffic(self.homeward), ring, even=evenly)


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
    at_once, *later = attention_seconds(plan, phase, device)
    nothing = torch.zeros(homes, homes, dtype=torch.float64)
    moved = {(direction, number): nothing for direction in ("in", "out") for number in range(len(later))}
    for (message, number), (source, target, num_bytes) in _messages(plan).items():
        if message.startswith(phase):
            matrix = torch.zeros(homes * homes, dtype=torch.float64)
            matrix.index_add_(0, source * homes + target, num_bytes)
            moved[message.removeprefix(f"{phase}_"), number] = matrix.reshape(homes, homes)

    def traffic(direction: str, *numbers: int) -> Traffic:
        return Traffic.of(sum((moved[direction, number] for number in numbers), nothing), per_node)

    numbers = range(len(later))
    rounds = [Round(later[n], traffic("in", n), traffic("out", n)) for n in numbers] if len(later) > 1 else ()
    computed = sum(later, torch.zeros_like(at_once))
    return AttentionWork(at_once, computed, traffic("in", *numbers), traffic("out", *numbers), rounds=rounds)


def attention_seconds(plan: Plan, phase: str, device: Device) -> list[torch.Tensor]:
    """Seconds of each server's tasks: of those that need only its own rows, and of those of each round of rows."""
    model = device.cost(phase)
    assert model.unit_ns is not None
    cost, unit = model.core.cost, model.unit_ns * 1e-9
    share, lengths = plan.heads.q // plan.heads.kv, plan.layout.document_lengths
    seconds: dict[int, list[float]] = {}
    for task in plan.tasks:
        of_round = seconds.setdefault(task.round, [0.0] * plan.layout.num_ranks)
        took = cost(0, 0, lengths[task.document], task.q_begin, task.q_end) * unit
        of_round[task.server] += took * share * (task.kv_head_end - task.kv_head_begin)
    nothing = [0.0] * plan.layout.num_ranks
    rounds = range(-1, max([0, *seconds]) + 1)
    return [torch.tensor(seconds.get(number, nothing), dtype=torch.float64) for number in rounds]


def _messages(plan: Plan) -> dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sources, targets and bytes of all transfers of each message and round."""
    found: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for transfer in plan.transfers:
        key = (transfer.message, transfer.round)
        found.setdefault(key, []).append((transfer.source, transfer.target, transfer.bytes))
    made = {}
    for key, rows in found.items():
        source, target, num_bytes = torch.tensor(rows, dtype=torch.int64).T
        made[key] = (source, target, num_bytes.double())
    return made
