"""`PlanSource`: what stands in the place of a plan where it is known only when a layer runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from distca.planner.layout import Chunk, Layout
from distca.planner.plan import Plan

NO_LAYER_OF_STAGE = "none of this stage"
"""The layer of the steps that a stage takes because other stages have more layers."""


class StepOfTick(NamedTuple):
    """One of several steps that belong together, in which ranks may be in different layers.

    Attributes:
        tick: the name of all of them together, which is the label of their plans.
        number: the step's number among them, the same on every rank. Ranks compare it.
        layer: the number or name of this rank's layer, if it is known.
    """

    tick: str
    number: int
    layer: int | str | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.tick}, step {self.number}{layer}"


class Resolved(NamedTuple):
    """The plans of one call of core attention, and who makes it.

    Attributes:
        plan: the plan of its forward step.
        plan_backward: the plan of its backward step, if that is another one.
        layer: the layer, or which step of a tick forward is, if known.
        layer_backward: the same for backward.
    """

    plan: Plan
    plan_backward: Plan | None
    layer: int | str | StepOfTick | None
    layer_backward: int | str | StepOfTick | None


class PlanSource(ABC):
    """Finds the plans of each call of `core_attention` when the call is made, recomputation included."""

    @abstractmethod
    def resolve(self, layer: int | str | None) -> Resolved:
        """The plans of a call that begins now. `layer` is the layer that the caller gave, if any."""

    @abstractmethod
    def upcoming(self) -> Plan:
        """The plan of the forward step that comes next. The step is not begun."""

    @abstractmethod
    def chunk(self) -> Chunk | None:
        """The chunks of the layer that this step is for, if it attends in them. They are the documents of its plan."""

    @abstractmethod
    def rows(self) -> tuple[Layout, int]:
        """The layout of the rows that the model (or that half of it) has now, and this rank's number in it. It is known
        in layers without attention, too, of which no step may be left.
        """

    @abstractmethod
    def ranks(self) -> list[int]:
        """The ranks in the context that have these rows, in the order of the layout."""

    @abstractmethod
    def longest_document(self) -> int:
        """Rows of the longest document of the batch that the model has now, on whatever rank."""

    @abstractmethod
    def for_parts(self, half: int) -> PlanSource:
        """What a half of a ping-pong, 0 or 1, gets in the place of this."""

    @abstractmethod
    def check_half_over(self) -> None:
        """Called when the forward pass of that half ends. Raises, and tells the other ranks, if steps are missing."""
