"""One tick under way on a rank: `CurrentTick`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distca.calls import calls_of_pass
from distca.errors import InvalidArgumentError, refusals_told
from distca.pipeline.halves import HALVES
from distca.pipeline.tick_table import Work
from distca.planner.plan_source import StepOfTick
from distca.serving import serve_calls

if TYPE_CHECKING:
    from distca.pipeline.ticks import Ticks

NEEDS_GRADIENT = (
    "Layers whose weights are frozen have a backward if what goes into the first of them needs a gradient: call "
    "requires_grad_() on it"
)


class CurrentTick:
    """One tick under way. Iterating over `Ticks` makes it.

    Attributes:
        number: number of the tick in the table.
        phase: ``"forward"`` or ``"backward"``.
        work: what this rank's stage does, or None if it only serves.
        calls: the calls of core attention and of its backward that every rank makes in this tick, in order. What they
            call a layer is a step of the tick.
    """

    def __init__(self, ticks: Ticks, number: int) -> None:
        self._ticks = ticks
        plans = ticks.plans
        self.number = number
        self.phase, works = plans.table[number]
        self.work = works[plans.stage]
        calls = calls_of_pass(self.phase, plans.depth, groups=ticks.groups, halves=plans.halves is not None)
        #: The steps of forward in the order of each half, or of the whole. Results that are saved count, too.
        self._forwards = [
            call.layer for call in calls if call.phase == "forward" and call.begins_step and not call.half
        ]
        is_saved = self.phase == "backward" and ticks.save_attention
        self.calls = [call for call in calls if call.phase == "backward" or not is_saved]
        self._taken = [0 for _ in plans.parts]  # forward steps that the model has taken, of each half
        self._first = ticks.context.step
        #: When `hand_over` was called, in seconds of `time.monotonic`.
        self.computed: float | None = None

    @property
    def name(self) -> str:
        """The tick in words."""
        return self._ticks.plans.label(self.number)

    def serve(self) -> None:
        """Takes part in all steps of the tick, on a rank whose stage has no work in it.

        Raises:
            InvalidArgumentError: the stage has work.
            DistcaError: as in `distca.serve`.
        """
        plans, context, options = self._ticks.plans, self._ticks.context, self._ticks.options
        with refusals_told(context):
            if self.work is not None:
                raise InvalidArgumentError(f"{self.name}: this stage has work, {self.work}; serve is for ticks without")
            labels, steps = {part: plans.label(self.number, part) for part in plans.parts}, range(plans.depth)
            served = [[plans.plan(self.number, step, part) for part in plans.parts] for step in steps]
            names = [[StepOfTick(labels[part], step) for part in plans.parts] for step in steps]
            serve_calls("serve", self.calls, served, names, context=context, **options)

    def check_complete(self) -> None:
        """Raises InvalidArgumentError, and tells the other ranks, unless all steps of the tick were taken."""
        taken, num_steps = self._ticks.context.step - self._first, sum(call.begins_step for call in self.calls)
        if taken == num_steps:
            return
        plans = self._ticks.plans
        halves = "" if plans.halves is None else " of two halves"
        recomputed = "with" if self._ticks.groups else "without"
        frozen = f". {NEEDS_GRADIENT}" if self.phase == "backward" else ""
        with refusals_told(self._ticks.context):
            raise InvalidArgumentError(
                f"{self.name}: stage {plans.stage} ended the tick after {taken} of {num_steps} steps of attention "
                f"({plans.depth} layers{halves} {recomputed} recomputation; this stage has "
                f"{plans.layers[plans.stage]}). What to change: a stage without work calls tick.serve(), one with "
                f"fewer layers ticks.pad(hidden), and recompute= says what activation checkpointing runs again{frozen}"
            )

    def check_half_over(self, half: int) -> None:
        """Raises InvalidArgumentError, and tells the other ranks, unless the half has taken its steps of forward."""
        plans, taken, needed = self._ticks.plans, self._taken[half], len(self._forwards)
        if taken == needed:
            return
        pads = taken == plans.layers[plans.stage]
        change = "plan.pad(hidden) with the plan of the half" if pads else "one distca.PingPong runs all layers"
        with refusals_told(self._ticks.context):
            raise InvalidArgumentError(
                f"{self.name}: the {HALVES[half]} of stage {plans.stage} ended after {taken} of {needed} steps. What "
                f"to change: {change}"
            )

    def hand_over(
        self, made: torch.Tensor | None, *, like: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> tuple[Work, torch.Tensor] | None:
        """Ends the tick: sends what this stage made to the stage that needs it, and receives what it needs itself.

        Args:
            made: the output of a forward tick, the gradient of the input of a backward tick, or None if the stage had
                no work or nobody needs it (at either end of the model).
            like, group: as in `Ticks.run`.

        Returns:
            The work of this stage that can now be done, with its input (or the gradient of its output); or None.

        Raises:
            InvalidArgumentError: steps of the tick are missing, or `made` has another shape than the next stage
                expects.
        """
        self.check_complete()
        self.computed = time.monotonic()
        plans = self._ticks.plans
        table, forward = plans.table, self.phase == "forward"
        num_stages = table.stages
        to, source = ((plans.stage + (1 if forward else -1) * way) % num_stages for way in (1, -1))
        coming, going = table.handed_to(self.number, plans.stage), table.handed_to(self.number, to)
        operations: list[Any] = []
        received = None
        if going is not None:
            rows = plans.rows(going.microbatch)
            shape = (rows, *like.shape[1:])
            if made is None or made.shape != shape:
                found = "nothing" if made is None else f"a tensor of shape {list(made.shape)}"
                with refusals_told(self._ticks.context):
                    raise InvalidArgumentError(
                        f"{self.name}: stage {plans.stage} hands over {found}; shape {list(shape)} is expected"
                    )
            if num_stages == 1:  # from one chunk of the model to the next one of the same stage
                assert coming is not None
                return coming, made.detach().to(like.dtype, copy=True)
            if rows > 0:  # gloo cannot send empty tensors
                operations.append(
                    _operation(dist.isend, made.to(like.dtype).contiguous(), plans.stages[to], self._ticks, group)
                )
        if coming is not None:
            rows = plans.rows(coming.microbatch)
            received = coming, like.new_empty(rows, *like.shape[1:])
            if rows > 0:
                operations.append(_operation(dist.irecv, received[1], plans.stages[source], self._ticks, group))
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return received

    def next_forward(self, half: int | None) -> int:
        """The number of the forward step of the tick that the model (or that half of it) begins next."""
        taken = self._taken[half or 0]
        if taken == len(self._forwards):
            plans = self._ticks.plans
            whose = "" if half is None else f"the {HALVES[half]} of "
            raise InvalidArgumentError(
                f"{self.name}: {whose}stage {plans.stage} calls core_attention more often than the tick has forward "
                f"steps: {len(self._forwards)}. What to change: layers= of PipelinePlans "
                f"({plans.layers[plans.stage]} for this stage), or recompute= of Ticks"
            )
        return self._forwards[taken]

    def take_forward(self, half: int | None) -> int:
        """Counts the forward step that the model (or that half of it) begins now, and returns its number."""
        step = self.next_forward(half)
        self._taken[half or 0] += 1
        return step


def _operation(kind: Any, tensor: torch.Tensor, ranks: list[int], ticks: Ticks, group: Any) -> dist.P2POp:
    return dist.P2POp(kind, tensor, ticks.context.global_ranks[ranks[ticks.plans.index]], group)
