"""What a model gets in the place of a plan while ticks are under way: `TickPlan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from distca.checkpoint import save_core_attention
from distca.errors import InvalidArgumentError
from distca.ops import core_attention
from distca.pingpong.turns import in_half
from distca.planner.plan_source import NO_LAYER_OF_STAGE, PlanSource, Resolved, StepOfTick

if TYPE_CHECKING:
    from distca.pipeline.ticks import Ticks
    from distca.planner.layout import Chunk, Layout
    from distca.planner.plan import Plan


class TickPlan(PlanSource):
    """What a model gets in the place of a `Plan`: each call of `core_attention` finds the plans of the current tick.

    Activation checkpointing runs layers again in the backward tick, where the other stages hold other micro-batches
    than in the forward tick. Therefore a plan cannot be an argument of the layer. The calls of a tick are counted; the
    first one is of the stage's first layer.

    `distca.PingPong` gives each half of the model a copy that finds the plans of that half. Therefore pass it as an
    argument there.
    """

    def __init__(self, ticks: Ticks, half: int | None = None) -> None:
        self._ticks, self._half = ticks, half

    def for_parts(self, half: int) -> TickPlan:
        """The copy for a half of a ping-pong."""
        return TickPlan(self._ticks, half)

    def check_half_over(self) -> None:
        """Raises InvalidArgumentError, and tells the other ranks, unless the half has taken its steps of forward."""
        if self._half is not None and self._ticks.plans.halves is not None:
            self._ticks.current.check_half_over(self._half)

    def upcoming(self) -> Plan:
        """The plan of the forward step that comes next in the current tick. The step is not begun."""
        ticks, tick, half = self._ticks, self._ticks.current, self._half
        self._check_halves(tick.name)
        return ticks.plans.plan(tick.number, tick.next_forward(half), half)

    def chunk(self) -> Chunk | None:
        """The chunks of the layer that the next forward step in the current tick is for, if it attends in chunks."""
        ticks, tick = self._ticks, self._ticks.current
        return ticks.plans.chunk(tick.number, tick.next_forward(self._half))

    def rows(self) -> tuple[Layout, int]:
        """The layout of the current micro-batch, or of that half of it, and this rank's number in it."""
        plans, tick = self._ticks.plans, self._ticks.current
        self._check_halves(tick.name)
        if tick.work is None:
            raise InvalidArgumentError(f"{tick.name}: stage {plans.stage} has no work in it; call tick.serve()")
        if plans.halves is None or self._half is None:
            return plans.layouts[tick.work.microbatch], plans.index
        return plans.halves[tick.work.microbatch][self._half].layout, plans.index

    def ranks(self) -> list[int]:
        """The ranks of this rank's stage."""
        plans = self._ticks.plans
        return plans.stages[plans.stage]

    def longest_document(self) -> int:
        """Rows of the longest document of the current micro-batch."""
        work = self._ticks.current.work
        return 0 if work is None else self._ticks.plans.layouts[work.microbatch].longest_document

    def resolve(self, layer: int | str | None) -> Resolved:
        """The plans of a call that begins now, and what the ranks compare."""
        ticks, tick, half = self._ticks, self._ticks.current, self._half
        self._check_halves(tick.name)
        plans, step = ticks.plans, tick.take_forward(half)
        backward = tick.number
        if tick.phase == "forward":
            if tick.work is None:
                raise InvalidArgumentError(f"{tick.name}: stage {plans.stage} has no work in it; call tick.serve()")
            if plans.table.has_backward:
                backward = plans.table.tick_of("backward", plans.stage, tick.work)
        return Resolved(
            plans.plan(tick.number, step, half),
            plans.plan(backward, step, half) if plans.table.has_backward else None,
            StepOfTick(plans.label(tick.number, half), step, layer),
            StepOfTick(plans.label(backward, half), step, layer),
        )

    def pad(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes part in the steps of a tick that are left, at the end of a stage with fewer layers than the deepest.

        Backward and recomputation take part by themselves, because the steps are a part of the graph. With
        ``recompute="stage"``, call it inside what is checkpointed. In a ping-pong each half calls it.

        Args:
            hidden: the output of the stage's last layer, ``[rows, ...]``.

        Returns:
            The same values.
        """
        ticks, plans = self._ticks, self._ticks.plans
        layers = plans.layers[plans.stage]
        run_again = {step for group in ticks.groups for step in range(*group)}
        alone = [(step, step + 1) for step in range(plans.depth) if step not in run_again]
        for begin, end in sorted([*ticks.groups, *alone]):
            steps = range(max(begin, layers), end)
            if not steps:
                continue
            if begin in run_again and begin >= layers and torch.is_grad_enabled():
                saved: dict[str, Any] = {"context_fn": save_core_attention} if ticks.save_attention else {}
                hidden = checkpoint(self._take_part, hidden, len(steps), use_reentrant=False, **saved)
            else:
                hidden = self._take_part(hidden, len(steps))
        return hidden

    def _take_part(self, hidden: torch.Tensor, num_steps: int) -> torch.Tensor:
        ticks, heads = self._ticks, self._ticks.plans.heads
        for _ in range(num_steps):
            empty = hidden.flatten()[:0].to(heads.dtype)
            q, k, v = (
                empty.reshape(0, n, dim)
                for n, dim in ((heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim))
            )
            out, *_ = core_attention(q, k, v, self, context=ticks.context, layer=NO_LAYER_OF_STAGE, **ticks.options)
            hidden = torch.cat([hidden.flatten(), out.flatten().to(hidden.dtype)]).reshape(hidden.shape)
        return hidden

    def _check_halves(self, tick: str) -> None:
        """Raises InvalidArgumentError unless the plans have halves exactly if the model runs in halves."""
        have_halves = self._ticks.plans.halves is not None
        if not have_halves and (self._half is not None or in_half()):
            raise InvalidArgumentError(
                f"{tick}: the model runs in distca.PingPong, and the plans have no halves. What to change: make them "
                "with PipelinePlans(..., halves=[distca.halves(layout) for layout in layouts]), or leave out PingPong"
            )
        if have_halves and self._half is None:
            what, change = (
                "the model is called outside of distca.PingPong",
                "distca.PingPong(model) on plans.split(...)",
            )
            if in_half():
                what = "a half of distca.PingPong has a plan that is of none"
                change = "ticks.plan is an argument of both halves; layers and pad use the one that a half is given"
            raise InvalidArgumentError(f"{tick}: the plans have halves, and {what}. What to change: {change}")
