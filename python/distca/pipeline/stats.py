"""What the plans of an iteration do: loads, bytes and arenas of all ticks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distca.planner.stats import PlanStats


@dataclass(frozen=True)
class TickStats:
    """What the plans of one tick do.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        steps: the statistics of each step's plan; with halves, of the plans of both halves, one after the other.
    """

    phase: str
    steps: list[PlanStats]

    @property
    def largest(self) -> float:
        """The largest load of each step at mean speed, summed: the time of the tick's attention, in load units."""
        return sum(step.largest for step in self.steps)

    @property
    def largest_before(self) -> float:
        """The same with every row computed at home."""
        return sum(step.largest_before for step in self.steps)

    @property
    def mean(self) -> float:
        """The mean load of the servers, summed over the steps: no schedule has a smaller `largest`."""
        return sum(sum(step.load) / step.num_servers for step in self.steps)


@dataclass(frozen=True)
class PipelineStats:
    """What the plans of an iteration do.

    Attributes:
        ticks: the statistics of each tick.
        backward_cost: the time of a backward step over that of its forward step.
    """

    ticks: list[TickStats]
    backward_cost: float = 2.5

    def _sum(self, of_tick: Any) -> float:
        return sum(of_tick(tick) * (1.0 if tick.phase == "forward" else self.backward_cost) for tick in self.ticks)

    @property
    def imbalance_before(self) -> float:
        """The sum over ticks of the largest load, over the sum of the means, with every row computed at home."""
        return self._sum(lambda tick: tick.largest_before) / (self._sum(lambda tick: tick.mean) or 1.0)

    @property
    def imbalance_after(self) -> float:
        """The same as planned. Ticks are synchronous, so this is the time of attention over the ideal."""
        return self._sum(lambda tick: tick.largest) / (self._sum(lambda tick: tick.mean) or 1.0)

    @property
    def bytes(self) -> int:
        """Bytes between ranks, in all steps of all ticks. A forward tick sends forward messages only."""
        return sum(
            step.bytes[f"{tick.phase}_{direction}"]
            for tick in self.ticks
            for step in tick.steps
            for direction in ("in", "out")
        )

    @property
    def arenas(self) -> list[int]:
        """For each rank the largest arena of any step and phase, in bytes."""
        of_steps = [
            [arena.total for arena in arenas]
            for tick in self.ticks
            for step in tick.steps
            for arenas in step.arena_bytes.values()
        ]
        return [max(of_rank) for of_rank in zip(*of_steps, strict=True)]

    @property
    def slot_bytes(self) -> int:
        """The largest arena of any rank: what a slot of the context's heap must hold."""
        return max(self.arenas)
