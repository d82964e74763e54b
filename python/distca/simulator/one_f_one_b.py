"""A step in which each rank computes its own rows' attention: 1F1B over the stages, no global barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distca.errors import InvalidArgumentError
from distca.planner.layout import Layout
from distca.planner.planning import plan
from distca.simulator.case import Case, Memory
from distca.simulator.machine import Machine
from distca.simulator.network import Traffic
from distca.simulator.passes import Gathered, LayerWork, ShardedWeights, run_pass
from distca.simulator.work import AttentionWork, attention_seconds

_PHASES = ("forward", "backward")


class OneForwardOneBackward:
    """The program of strategies that compute every row where it is.

    Args:
        case: what is simulated.
        layouts: for each micro-batch its rows over the homes of a stage.
        gather: ranks of a context parallel group, neighbours among the homes, which gather each other's keys; 1: none.
    """

    def __init__(self, case: Case, layouts: Sequence[Layout], *, gather: int = 1) -> None:
        if case.parallelism.chunks > 1:
            raise InvalidArgumentError(
                "simulate: chunks > 1 is modelled for distca's ticks alone; leave it out, or choose those strategies"
            )
        self.case, self.layouts, self.gather = case, layouts, gather
        device = case.cluster.device
        self._seconds: list[dict[str, torch.Tensor]] = []
        for layout in layouts:
            at_home = plan(layout, case.heads, balance=False, cost=device.cost())
            of_phases = {phase: torch.stack(attention_seconds(at_home, phase, device)).sum(0) for phase in _PHASES}
            self._seconds.append(of_phases)
        self._even = {phase: float(torch.stack([of[phase] for of in self._seconds]).mean()) for phase in _PHASES}

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most. Gathered keys are kept to backward."""
        case = self.case
        rows = max(layout.num_rows(home) for layout in self.layouts for home in range(layout.num_ranks))
        in_flight = min(len(self.layouts), case.parallelism.pipeline)
        gathered = 0.0
        if self.gather > 1:
            gathered = max(map(self._gathered_bytes, range(len(self.layouts)))) * in_flight * case.stage_layers
        return Memory(case.state_bytes, case.activation_bytes(rows, in_flight), gathered)

    def play(self, machine: Machine) -> None:
        """Runs the passes of all stages, each as soon as its input is there."""
        case, stages = self.case, self.case.parallelism.pipeline
        weights = case.sharded_weights(kept=False)
        orders = [order_of_1f1b(stage, stages, len(self.layouts)) for stage in range(stages)]
        arrived: dict[tuple[str, int, int], torch.Tensor] = {}
        while any(map(len, orders)):
            for stage, order in enumerate(orders):
                while order and self._may_run(order[0], stage, arrived):
                    phase, number = order.pop(0)
                    if (phase, number, stage) in arrived:
                        machine.wait_until(arrived.pop((phase, number, stage)))
                    self._run(machine, phase, number, stage, weights)
                    target = stage + (1 if phase == "forward" else -1)
                    if 0 <= target < stages:
                        arrived[phase, number, target] = self._hand_over(machine, number, stage, target)
        if weights is not None:
            weights.finish(machine)
        case.finish(machine)

    def _may_run(self, what: tuple[str, int], stage: int, arrived: Mapping[tuple[str, int, int], torch.Tensor]) -> bool:
        first = stage == (0 if what[0] == "forward" else self.case.parallelism.pipeline - 1)
        return first or (*what, stage) in arrived

    def _run(self, machine: Machine, phase: str, number: int, stage: int, weights: ShardedWeights | None) -> None:
        case, layout = self.case, self.layouts[number]
        work = LayerWork(case.dense(case.on_stage(layout, stage)), self._attention(number, stage))
        run_pass(
            machine,
            phase,
            case.stage_layers,
            {None: work},
            recompute=case.parallelism.recompute,
            embedding=stage == 0,
            head=stage == case.parallelism.pipeline - 1,
            gathered=self._gathered(number, stage),
            weights=weights,
        )

    def _attention(self, number: int, stage: int) -> dict[str, AttentionWork]:
        case = self.case
        homes, per_node = case.num_homes, case.per_node
        nothing = torch.zeros(homes // per_node, per_node, per_node, dtype=torch.float64)
        none = torch.zeros(homes, dtype=torch.float64)
        traffic = Traffic(nothing, None, none, none)
        work = {}
        for phase, of_stage in self._seconds[number].items():
            seconds, even = torch.zeros_like(none), torch.zeros_like(none)
            seconds[case.stages[stage]], even[case.stages[stage]] = of_stage, self._even[phase]
            work[phase] = AttentionWork(seconds, none, traffic, traffic, even)
        return work

    def _gathered_bytes(self, number: int) -> float:
        """Bytes of keys and values of the largest context parallel group."""
        rows = [self.layouts[number].num_rows(home) for home in range(self.layouts[number].num_ranks)]
        largest = max(sum(rows[first : first + self.gather]) for first in range(0, len(rows), self.gather))
        heads = self.case.heads
        return float(largest * heads.kv * (heads.dim + heads.value_dim) * self.case.model.number_bytes)

    def _gathered(self, number: int, stage: int) -> Gathered | None:
        if self.gather == 1:
            return None
        groups = torch.tensor(self.case.stages[stage]).reshape(-1, self.gather)
        num_bytes = self._gathered_bytes(number)
        return Gathered(groups, num_bytes, num_bytes)

    def _hand_over(self, machine: Machine, number: int, stage: int, target: int) -> torch.Tensor:
        case = self.case
        to = list[int | None]([None] * case.num_homes)
        for home, other in zip(case.stages[stage], case.stages[target], strict=True):
            to[home] = other
        return machine.network.send(machine.now, case.handed_over(case.on_stage(self.layouts[number], stage), to))


def order_of_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """The passes of a stage in 1F1B: forwards until the first backward can come, then one of each in turns.

    Examples:
        >>> from distca.simulator.one_f_one_b import order_of_1f1b
        >>> [phase[0] + str(number) for phase, number in order_of_1f1b(0, 2, 3)]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(micro_batches, stages - stage - 1)
    order = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [("forward", ahead + number), ("backward", number)]
    return order + [("backward", number) for number in range(micro_batches - ahead, micro_batches)]
