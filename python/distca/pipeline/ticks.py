"""An iteration under way on one rank: `Ticks`, and the plan that a model gets meanwhile, `TickPlan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from distca.arguments import check_type
from distca.checkpoint import save_core_attention
from distca.context import Context
from distca.errors import InvalidArgumentError, refusals_told
from distca.ops import core_attention
from distca.pingpong.turns import in_half
from distca.pipeline.plans import PipelinePlans
from distca.pipeline.recomputation import groups_of
from distca.pipeline.tick_table import Work
from distca.planner.plan_source import PlanSource, Resolved, StepOfTick
from distca.registry import find_context
from distca.serving import serve


class Ticks:
    """An iteration under way on this rank. Iterating makes one tick after the other the current one.

    In a loop of one's own::

        ticks = distca.pipeline.Ticks(plans)
        for tick in ticks:
            if tick.work is None:
                tick.serve()
            elif tick.phase == "forward":
                outputs[tick.work] = stage(inputs[tick.work], plan=ticks.plan)  # passes plan to core_attention
            else:
                torch.autograd.backward(outputs.pop(tick.work), gradients.pop(tick.work, None))
            ...  # hand over to the neighbours: `CurrentTick.hand_over`

    `run` is this loop. All ranks of all stages iterate alike. A tick that is left after too few calls of
    `core_attention`, and a call too many, is an error at once, which all ranks are told.

    Args:
        plans: the plans of the iteration.
        context: the context that runs them, or its name.
        recompute: what activation checkpointing runs again in backward: None (nothing), ``"layer"``, ``"stage"`` (all
            layers of a chunk at once), or the sizes of the groups of layers that are run again together. It is the same
            on every rank.
        save_attention: whether `distca.save_core_attention` keeps the results of core attention, so that only the rest
            is run again. It is the same on every rank.
        options: ``scale``, ``softcap``, ``sinks`` and ``deterministic`` of the layers, as in `core_attention`; for the
            steps that this rank takes without a layer of its own.

    Attributes:
        plans: as above.
        plan: what the model gets in the place of a `Plan`.

    Raises:
        InvalidArgumentError: an argument is wrong, or a shallow stage ends inside a group of `recompute`.
    """

    def __init__(
        self,
        plans: PipelinePlans,
        *,
        context: str | Context = "default",
        recompute: str | Sequence[int] | None = None,
        save_attention: bool = False,
        **options: Any,
    ) -> None:
        check_type(
            "Ticks", "plans", plans, PipelinePlans, "distca.pipeline.PipelinePlans(layouts, heads, stages=[...])"
        )
        here = find_context(context)
        if here is None:
            raise InvalidArgumentError(f"Ticks: there is no context {context!r}; distca.init makes one")
        if (here.rank, here.num_ranks) != (plans.rank, plans.num_ranks):
            raise InvalidArgumentError(
                f"Ticks: the plans are seen from rank {plans.rank} of {plans.num_ranks}, this is rank {here.rank} of "
                f"{here.num_ranks} of context {here.name!r}; make them with PipelinePlans(..., context=)"
            )
        self.plans, self.context, self.options = plans, here, options
        self.groups = groups_of("Ticks", recompute, plans.layers)
        self.save_attention = save_attention
        self.plan = TickPlan(self)
        self._current: CurrentTick | None = None

    def __iter__(self) -> Iterator[CurrentTick]:
        for number in range(len(self.plans.table)):
            tick = self._current = CurrentTick(self, number)
            yield tick
            tick.check_complete()
        self._current = None

    @property
    def current(self) -> CurrentTick:
        """The current tick. Raises InvalidArgumentError outside of an iteration."""
        if self._current is None:
            raise InvalidArgumentError(
                "TickPlan: no tick is under way; call the model inside `for tick in ticks`, or give it a plan"
            )
        return self._current

    def pad(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes part in the steps of a tick that are left, at the end of a stage with fewer layers than the deepest.

        Backward and recomputation take part by themselves, because the steps are a part of the graph. With
        ``recompute="stage"``, call it inside what is checkpointed.

        Args:
            hidden: the output of the stage's last layer, ``[rows, ...]``.

        Returns:
            The same values.
        """
        layers, depth = self.plans.layers[self.plans.stage], self.plans.depth
        for begin, end in self.groups or [(step, step + 1) for step in range(depth)]:
            steps = range(max(begin, layers), end)
            if not steps:
                continue
            if self.groups and begin >= layers and torch.is_grad_enabled():
                saved: dict[str, Any] = {"context_fn": save_core_attention} if self.save_attention else {}
                hidden = checkpoint(self._take_part, hidden, len(steps), use_reentrant=False, **saved)
            else:
                hidden = self._take_part(hidden, len(steps))
        return hidden

    def _take_part(self, hidden: torch.Tensor, num_steps: int) -> torch.Tensor:
        heads = self.plans.heads
        for _ in range(num_steps):
            empty = hidden.flatten()[:0].to(heads.dtype)
            q, k, v = (
                empty.reshape(0, n, dim)
                for n, dim in ((heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim))
            )
            out, _lse = core_attention(q, k, v, self.plan, context=self.context, **self.options)
            hidden = torch.cat([hidden.flatten(), out.flatten().to(hidden.dtype)]).reshape(hidden.shape)
        return hidden

    def run(
        self,
        stage: Callable[[Work, torch.Tensor | None], torch.Tensor],
        *,
        like: torch.Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> list[torch.Tensor]:
        """Runs the iteration: forward, backward, and the hand-over between stages.

        Args:
            stage: called with a work of this rank's stage and its input ``[rows, ...]``, or None for the first layers
                of the model. It returns the output ``[rows, ...]``, or at the end of the model the loss of the
                micro-batch. It calls the layers with ``plan=ticks.plan``.
            like: a tensor with the dtype, the device and the dimensions after the first of what stages hand over.
            group: the process group whose ranks are the context's; by default all processes.

        Returns:
            The losses of the micro-batches, detached, on the ranks of the last stage; nothing on the others.
        """
        table = self.plans.table
        last = table.stages * table.chunks - 1
        inputs: dict[Work, torch.Tensor] = {}
        outputs: dict[Work, torch.Tensor] = {}
        gradients: dict[Work, torch.Tensor] = {}
        losses: dict[int, torch.Tensor] = {}
        for tick in self:
            work, made = tick.work, None
            if work is None:
                tick.serve()
            elif tick.phase == "forward":
                output = stage(work, inputs.get(work) if table.has_backward else inputs.pop(work, None))
                if table.has_backward:
                    outputs[work] = output
                if table.position(self.plans.stage, work.chunk) == last:
                    losses[work.microbatch] = output.detach()
                else:
                    made = output.detach()
            else:
                torch.autograd.backward(outputs.pop(work), gradients.pop(work, None))
                taken = inputs.pop(work, None)
                made = None if taken is None else taken.grad
            received = tick.hand_over(made, like=like, group=group)
            if received is None:
                continue
            to, tensor = received
            if tick.phase == "forward":
                inputs[to] = tensor.requires_grad_(table.has_backward)
            else:
                gradients[to] = tensor
        return [losses[microbatch] for microbatch in sorted(losses)]


class CurrentTick:
    """One tick under way. Iterating over `Ticks` makes it.

    Attributes:
        number: number of the tick in the table.
        phase: ``"forward"`` or ``"backward"``.
        work: what this rank's stage does, or None if it only serves.
        steps: the steps of attention that every rank takes in this tick, in order: (phase, step).
    """

    def __init__(self, ticks: Ticks, number: int) -> None:
        self._ticks = ticks
        plans = ticks.plans
        self.number = number
        self.phase, works = plans.table[number]
        self.work = works[plans.stage]
        calls = _calls(self.phase, plans.depth, ticks.groups)
        self._forwards = [step for phase, step in calls if phase == "forward"]
        is_saved = self.phase == "backward" and ticks.save_attention
        self.steps = [(phase, step) for phase, step in calls if phase == "backward" or not is_saved]
        self._taken = 0  # forward steps that the model has taken
        self._first = ticks.context.step

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
        ticks = self._ticks
        with refusals_told(ticks.context):
            if self.work is not None:
                raise InvalidArgumentError(f"{self.name}: this stage has work, {self.work}; serve is for ticks without")
        for phase, step in self.steps:
            served = ticks.plans.plan(self.number, step)
            serve(served, phase, context=ticks.context, layer=StepOfTick(self.name, step), **ticks.options)

    def check_complete(self) -> None:
        """Raises InvalidArgumentError, and tells the other ranks, unless all steps of the tick were taken."""
        taken = self._ticks.context.step - self._first
        if taken == len(self.steps):
            return
        plans = self._ticks.plans
        recomputed = "without recomputation" if self._ticks.groups is None else "with recomputation"
        with refusals_told(self._ticks.context):
            raise InvalidArgumentError(
                f"{self.name}: stage {plans.stage} ended the tick after {taken} of {len(self.steps)} steps of "
                f"attention ({plans.depth} layers {recomputed}; this stage has {plans.layers[plans.stage]}). What to "
                "change: a stage without work calls tick.serve(), one with fewer layers ticks.pad(hidden), and "
                "recompute= says what activation checkpointing runs again"
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
        plans = self._ticks.plans
        table, forward = plans.table, self.phase == "forward"
        num_stages = table.stages
        to, source = ((plans.stage + (1 if forward else -1) * way) % num_stages for way in (1, -1))
        coming, going = table.handed_to(self.number, plans.stage), table.handed_to(self.number, to)
        operations, received = [], None
        if going is not None:
            rows = plans.rows(going.microbatch)
            shape = (rows, *like.shape[1:])
            if made is None or made.shape != shape:
                found = "nothing" if made is None else f"a tensor of shape {list(made.shape)}"
                with refusals_told(self._ticks.context):
                    raise InvalidArgumentError(
                        f"{self.name}: stage {plans.stage} hands over {found}; shape {list(shape)} is expected"
                    )
            if rows > 0:  # gloo cannot send empty tensors
                operations.append(
                    _operation(dist.isend, made.to(like.dtype).contiguous(), plans.stages[to], plans, group)
                )
        if coming is not None:
            rows = plans.rows(coming.microbatch)
            received = coming, like.new_empty(rows, *like.shape[1:])
            if rows > 0:
                operations.append(_operation(dist.irecv, received[1], plans.stages[source], plans, group))
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return received

    def take_forward(self) -> int:
        """The number of the next forward step of the tick, which the model begins."""
        if self._taken == len(self._forwards):
            plans = self._ticks.plans
            raise InvalidArgumentError(
                f"{self.name}: stage {plans.stage} calls core_attention more often than the tick has forward steps: "
                f"{len(self._forwards)}. What to change: layers= of PipelinePlans "
                f"({plans.layers[plans.stage]} for this stage), or recompute= of Ticks"
            )
        self._taken += 1
        return self._forwards[self._taken - 1]


class TickPlan(PlanSource):
    """What a model gets in the place of a `Plan`: each call of `core_attention` finds the plans of the current tick.

    Activation checkpointing runs layers again in the backward tick, where the other stages hold other micro-batches
    than in the forward tick. Therefore a plan cannot be an argument of the layer. The calls of a tick are counted; the
    first one is of the stage's first layer.
    """

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks

    def resolve(self, layer: int | str | None) -> Resolved:
        """The plans of a call that begins now, and what the ranks compare."""
        ticks, tick = self._ticks, self._ticks.current
        if in_half():
            raise InvalidArgumentError(
                f"{tick.name}: ping-pong does not work inside of a pipeline yet; call the model without distca.PingPong"
            )
        plans, step = ticks.plans, tick.take_forward()
        backward = tick.number
        if tick.phase == "forward":
            if tick.work is None:
                raise InvalidArgumentError(f"{tick.name}: stage {plans.stage} has no work in it; call tick.serve()")
            if plans.table.has_backward:
                backward = plans.table.tick_of("backward", plans.stage, tick.work)
        return Resolved(
            plans.plan(tick.number, step),
            plans.plan(backward, step) if plans.table.has_backward else None,
            StepOfTick(plans.label(tick.number), step, layer),
            StepOfTick(plans.label(backward), step, layer),
        )


def _operation(kind: Any, tensor: torch.Tensor, ranks: list[int], plans: PipelinePlans, group: Any) -> dist.P2POp:
    peer = ranks[plans.index]
    return dist.P2POp(kind, tensor, peer if group is None else dist.get_global_rank(group, peer), group)


def _calls(phase: str, depth: int, groups: list[tuple[int, int]] | None) -> list[tuple[str, int]]:
    """The calls of core attention and its backward in a tick (phase and step), in the order of every rank."""
    if phase == "forward":
        return [("forward", step) for step in range(depth)]
    calls: list[tuple[str, int]] = []
    for begin, end in reversed(groups or [(0, depth)]):
        if groups is not None:
            calls += [("forward", step) for step in range(begin, end)]
        calls += [("backward", step) for step in reversed(range(begin, end))]
    return calls
