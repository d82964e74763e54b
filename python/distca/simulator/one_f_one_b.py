"""A step in which each rank computes its own rows' attention: 1F1B over the stages, no global barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Layout
from distca.simulator.case import Case, Memory
from distca.simulator.machine import Machine
from distca.simulator.passes import Gathered, LayerWork, ShardedWeights, run_pass
from distca.simulator.work import AttentionWork, PieceTimes, StageWork

#: The work of a micro-batch's attention by phase.
PhaseWork = Mapping[str, StageWork]

_PHASES = ("forward", "backward")


class OneForwardOneBackward:
    """The program of strategies without plans over all stages: 1F1B, with attention inside each stage.

    Args:
        case: what is simulated.
        layouts: for each micro-batch its rows over the homes of a stage.
        gather: ranks of a context parallel group, neighbours among the homes, which gather each other's keys; 1: none.
        attention: for each micro-batch its attention; by default every home computes that of its rows.
        buffers: bytes of a rank for one layer of a micro-batch that are kept from forward to backward.
        once: bytes of a rank that are needed once.
        rows: the most rows of a home that are kept; by default those of a micro-batch.
        barrier: whether all homes wait for each other after each micro-batch.
    """

    def __init__(
        self,
        case: Case,
        layouts: Sequence[Layout],
        *,
        gather: int = 1,
        attention: Sequence[PhaseWork] | None = None,
        buffers: float = 0.0,
        once: float = 0.0,
        rows: int | None = None,
        barrier: bool = False,
    ) -> None:
        if case.parallelism.chunks > 1:
            raise InvalidArgumentError(
                "simulate: chunks > 1 is modelled for distca's ticks alone; leave it out, or choose those strategies"
            )
        self.case, self.layouts, self.gather = case, layouts, gather
        self._buffers, self._once, self._barrier = buffers, once, barrier
        homes = range(case.parallelism.homes)
        self._rows = max(layout.num_rows(home) for layout in layouts for home in homes) if rows is None else rows
        self._works = [_at_home(case, layout) for layout in layouts] if attention is None else attention
        self._even = {phase: float(torch.stack([of[phase].computed for of in self._works]).mean()) for phase in _PHASES}

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most. Gathered keys are kept to backward."""
        case = self.case
        in_flight = min(len(self.layouts), case.parallelism.pipeline)
        kept = self._buffers
        if self.gather > 1:
            kept += max(map(self._gathered_bytes, range(len(self.layouts))))
        activations = case.activation_bytes(self._rows, in_flight)
        return Memory(case.state_bytes, activations, kept * in_flight * case.stage_layers + self._once)

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
        work = LayerWork(case.dense(case.on_stage(layout, stage)), self.attention(number, stage))
        run_pass(
            machine,
            phase,
            case.stage_layers,
            {None: work},
            recompute=case.parallelism.recompute,
            save_attention=case.parallelism.save_attention,
            embedding=stage == 0,
            head=stage == case.parallelism.pipeline - 1,
            gathered=self.gathered(number, stage),
            weights=weights,
        )
        if self._barrier and phase == "backward":
            machine.wait_until(machine.now.max().expand_as(machine.now))

    def attention(self, number: int, stage: int) -> dict[str, AttentionWork]:
        """The attention of a layer of a micro-batch on a stage, by phase."""
        case = self.case
        place = (case.stages[stage], case.num_homes, case.per_node)
        return {phase: work.placed(*place, self._even[phase]) for phase, work in self._works[number].items()}

    def _gathered_bytes(self, number: int) -> float:
        """Bytes of keys and values of the largest context parallel group."""
        rows = [self.layouts[number].num_rows(home) for home in range(self.layouts[number].num_ranks)]
        largest = max(sum(rows[first : first + self.gather]) for first in range(0, len(rows), self.gather))
        heads = self.case.heads
        return float(largest * heads.kv * (heads.dim + heads.value_dim) * self.case.model.number_bytes)

    def gathered(self, number: int, stage: int) -> Gathered | None:
        """The keys that are gathered in a layer of a micro-batch on a stage; None: none."""
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


def _at_home(case: Case, layout: Layout) -> PhaseWork:
    """Every home computes the attention of its rows. Neighbouring rows of a document are one piece."""
    work = {}
    for phase in ("forward", "backward"):
        times = PieceTimes(case.cluster.device, phase, case.heads.q)
        seconds = [
            sum(times.seconds(end - begin, end, causal=True) for begin, end in _pieces(layout, home))
            for home in range(layout.num_ranks)
        ]
        work[phase] = StageWork(torch.tensor(seconds, dtype=torch.float64))
    return work


def _pieces(layout: Layout, home: int) -> list[tuple[int, int]]:
    """The rows [begin, end) of unbroken pieces of documents on a home."""
    pieces: list[tuple[int, int, int]] = []
    for document, begin, end in sorted(layout.segments(home)):
        if pieces and pieces[-1][0] == document and pieces[-1][2] == begin:
            pieces[-1] = (document, pieces[-1][1], end)
        elif document != PADDING:
            pieces.append((document, begin, end))
    return [(begin, end) for _, begin, end in pieces]


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
