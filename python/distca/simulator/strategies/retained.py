"""distca in ping-pong, with servers that keep keys and values from forward to backward where memory is left."""

from __future__ import annotations

import dataclasses

from distca.errors import InvalidArgumentError
from distca.planner.plan import Plan
from distca.planner.planning import plan
from distca.simulator.case import Case, Memory, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class Retained(Strategy):
    """Plans of ``distca.plan(retain_bytes=...)`` for each half of `distca.halves`.

    Every layer of a micro-batch may keep the same share of what the device's memory leaves. In a pipeline nothing can
    be kept, because a backward tick has other servers than the forward tick.
    """

    name = "distca-retained"
    about = "distca's plans in ping-pong, keys kept by their servers from forward to backward"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """Without a pipeline."""
        return parallelism.pipeline == 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        if case.parallelism.pipeline > 1:
            raise InvalidArgumentError(
                f"simulate: distca-retained with pipeline = {case.parallelism.pipeline}; keys are kept without a "
                "pipeline alone"
            )
        return _Retaining(case)


class _Retaining(Ticking):
    """The program of distca, whose plans keep keys."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, ping_pong=True)
        self._steps = len(self.plans.parts) * case.stage_layers  # that wait for their backward at the same time
        left = case.cluster.device.memory - super().memory.total
        self.retain_bytes = max(0, int(left / self._steps))
        self._made: dict[tuple[int, int | None], Plan] = {}

    @property
    def memory(self) -> Memory:
        """The memory of the rank that needs most, with all that is kept."""
        memory = super().memory
        kept = max(
            max(self.plan_of(tick, part).stats.retained_bytes)
            for tick in range(len(self.plans.table))
            for part in self.plans.parts
        )
        return dataclasses.replace(memory, buffers=memory.buffers + kept * self._steps)

    def plan_of(self, tick: int, part: int | None) -> Plan:
        """The same plan, but that it keeps keys."""
        (work,) = self.plans.table[tick].work
        assert work is not None
        key = (work.microbatch, part)
        if key not in self._made:
            case = self.case
            self._made[key] = plan(
                super().plan_of(tick, part).layout,
                case.heads,
                cost=case.cluster.device.cost(),
                tolerance=case.tolerance,
                ranks_per_node=case.per_node,
                overlap=True,
                retain_bytes=self.retain_bytes,
            )
        return self._made[key]
