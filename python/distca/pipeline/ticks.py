"""An iteration under way on one rank: `Ticks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from distca.arguments import check_flag, check_type
from distca.context import Context
from distca.errors import InvalidArgumentError, refusals_told
from distca.inputs import as_numbers
from distca.pipeline.current_tick import NEEDS_GRADIENT, CurrentTick
from distca.pipeline.plans import PipelinePlans
from distca.pipeline.recomputation import groups_of_stages
from distca.pipeline.tick_plan import TickPlan
from distca.pipeline.tick_table import Work
from distca.planner.scores import Scores
from distca.registry import find_context


class TickTime(NamedTuple):
    """When a rank did what in a tick. Times are seconds of `time.monotonic`."""

    #: ``"forward"`` or ``"backward"``.
    phase: str
    #: What this rank's stage did; None if it only served.
    work: Work | None
    begin: float
    #: When it had computed its work, or served, and began to hand over.
    computed: float
    end: float


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
            layers of a chunk at once), or the sizes of the groups of layers that are run again together, in which a 0
            stands for a layer that is not run again. It is the same on every rank.
        save_attention: whether `distca.save_core_attention` keeps the results of core attention, so that only the rest
            is run again. It is the same on every rank.
        options: ``scale``, ``softcap``, ``deterministic`` and ``max_logits`` of the layers, as in `core_attention`;
            for the steps that this rank takes without a layer of its own.

    Attributes:
        plans: as above.
        plan: what the model gets in the place of a `Plan`, in a ping-pong as an argument of both halves.
        times: when the ticks that are over began and ended on this rank.

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
        self.plans, self.context = plans, here
        self.options: dict[str, Any] = {"scale": None, "softcap": 0.0, "deterministic": False, "max_logits": False}
        if unknown := options.keys() - self.options.keys():
            raise InvalidArgumentError(f"Ticks: unknown {sorted(unknown)}; {list(self.options)} are options of layers")
        self.options |= options
        scale, softcap = as_numbers(self.options["scale"], self.options["softcap"])
        Scores(scale=scale, softcap=softcap).check("Ticks")
        self.options |= {"scale": scale, "softcap": softcap}
        flags = {name: self.options[name] for name in ("deterministic", "max_logits")}
        for name, value in (flags | {"save_attention": save_attention}).items():
            check_flag("Ticks", name, value)
        self.groups = groups_of_stages("Ticks", recompute, plans.layers)
        self.save_attention = save_attention
        self.plan = TickPlan(self)
        self.times: list[TickTime] = []
        self._current: CurrentTick | None = None

    def __iter__(self) -> Generator[CurrentTick]:
        tick = None
        try:
            for number in range(len(self.plans.table)):
                begin = time.monotonic()
                tick = self._current = CurrentTick(self, number)
                yield tick
                tick.check_complete()
                end = time.monotonic()
                self.times.append(TickTime(tick.phase, tick.work, begin, tick.computed or end, end))
        finally:
            if self._current is tick:  # a loop that was left may be closed when another one is under way
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
        """`TickPlan.pad` of `plan`, for stages without ping-pong."""
        return self.plan.pad(hidden)

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
            group: the process group over which stages send, with all ranks of the context; by default all processes.

        Returns:
            The losses of the micro-batches, detached, on the ranks of the last stage; nothing on the others.
        """
        table = self.plans.table
        last = table.stages * table.chunks - 1
        inputs: dict[Work, torch.Tensor] = {}
        outputs: dict[Work, torch.Tensor] = {}
        gradients: dict[Work, torch.Tensor] = {}
        losses: dict[int, torch.Tensor] = {}
        with closing(iter(self)) as ticks:
            for tick in ticks:
                work, made = tick.work, None
                if work is None:
                    tick.serve()
                elif tick.phase == "forward":
                    output = stage(work, inputs.get(work) if table.has_backward else inputs.pop(work, None))
                    if table.has_backward:
                        if not output.requires_grad:
                            with refusals_told(self.context):
                                raise InvalidArgumentError(
                                    f"{tick.name}: the output of stage {self.plans.stage} needs no gradient. "
                                    f"{NEEDS_GRADIENT}"
                                )
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
