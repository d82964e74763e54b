"""`ScheduleTicks`: the tick table of `distca.pipeline` as a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from distca.arguments import check_type
from distca.errors import DistcaError, InvalidArgumentError, refusals_told
from distca.pipeline import Ticks, TickTable

#: All that PyTorch does not promise to keep, but for the attributes in `_order` and `_shapes`.
_PRIVATE = (
    *("_PipelineScheduleRuntime", "_Action"),
    *("_ComputationType.FORWARD", "_ComputationType.FULL_BACKWARD", "_ComputationType.OVERLAP_F_B"),
    *(f"_PipelineScheduleRuntime.{name}" for name in ("register_custom_function", "_step_microbatches")),
    "_PipelineScheduleRuntime._prepare_schedule_with_comms",
)


def _private(owner: Any, *names: str) -> list[Any]:
    """What `owner` has under these names. Raises DistcaError, which says the first that is missing."""
    try:
        return [attrgetter(name)(owner) for name in names]
    except AttributeError as error:
        raise DistcaError(
            f"torch.distributed.pipelining of PyTorch {torch.__version__} lacks what distca uses ({error}). What to "
            "change: have a PyTorch from 2.10 to 2.15, or use the loop distca.pipeline.Ticks.run"
        ) from None


_Runtime, _Action, _FORWARD, _BACKWARD, _TICK, *_ = _private(schedules, *_PRIVATE)
#: What is left of the actions in an evaluation, by their names in any version. The first is `_TICK`.
_EVALUATION = ("OVERLAP_F_B", "FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F", "UNSHARD", "RESHARD")


class ScheduleTicks(_Runtime):  # type: ignore[misc, valid-type]
    """A pipeline schedule whose stages all do the same phase, and share the attention of a tick.

    It is used like ``ScheduleInterleaved1F1B`` of torch.distributed.pipelining, and runs in the same runtime, which it
    does not change. Micro-batches, losses, data parallelism (DDP, FSDP2) and ``scale_grads`` are PyTorch's. Each step
    gets the `Ticks` of its own lengths. The module of a stage gets ``ticks.plan`` as its keyword argument ``plan``.

    Args:
        stages: the stages of this rank: of p ranks, rank r has r, r + p, ... Each `PipelineStage` has ``input_args``
            and ``output_args``, because PyTorch would otherwise run the model outside of all ticks to learn the shapes.
            What is handed over requires gradients. All micro-batches have as many rows on a rank as these tensors.
        n_microbatches: number of micro-batches of a step.
        loss_fn: called with the output of the last stage and the target of a micro-batch. None is for evaluation only.
        options: as for ``ScheduleInterleaved1F1B``: ``scale_grads``, ``kwargs_chunk_spec`` and others.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(list(stages), n_microbatches, loss_fn=loss_fn, backward_requires_autograd=False, **options)
        self._distca_stages, self._microbatches, self._trains = list(stages), n_microbatches, loss_fn is not None
        self._processes = dist.get_process_group_ranks(stages[0].group)
        self._ticks: Ticks | None = None
        self._table: list[Any] = []
        self._agreed = False
        self.register_custom_function(_TICK, self._tick)

    def step(self, *args: Any, ticks: Ticks, **kwargs: Any) -> Any:
        """Runs an iteration. All ranks of the pipeline call it.

        Args:
            args: on the first stage the inputs of all micro-batches, joined in dimension 0.
            ticks: of the plans of this iteration.
            kwargs: ``target``, ``losses`` and others, as in PyTorch's schedules; and keyword arguments of the stages.

        Returns:
            On the last stage its outputs, joined.

        Raises:
            InvalidArgumentError: the ticks do not fit the stages or the micro-batches, or were run before.
            DistcaError: as in `distca.core_attention`. The schedule cannot be used any more.
        """
        return self._run(ticks, self._trains, args, kwargs)

    def eval(self, *args: Any, ticks: Ticks, **kwargs: Any) -> Any:
        """`step` without gradients, of ``PipelinePlans(..., backward=False)``."""
        with torch.no_grad():
            return self._run(ticks, False, args, kwargs)

    def _run(self, ticks: Ticks, backward: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_type("ScheduleTicks", "ticks", ticks, Ticks, "distca.pipeline.Ticks(plans)")
        with refusals_told(ticks.context):
            self._check(self._problem(ticks, backward))
        self._ticks = ticks
        self._order(ticks.plans.table)
        try:
            with closing(iter(ticks)) as self._iteration:
                result = super().step(*args, **kwargs)
                next(self._iteration, None)  # the last tick is over
        except Exception as error:
            if isinstance(error.__cause__, DistcaError):  # PyTorch makes errors of stages RuntimeErrors
                raise error.__cause__ from None
            if not isinstance(error, DistcaError):
                ticks.context.check()  # what a peer has told is why its tensors do not come
            raise
        return result

    def _check(self, problem: str | None) -> None:
        """Raises InvalidArgumentError for a problem: before the stages connect, one of any rank of the pipeline."""
        if not self._agreed:
            problems: list[str | None] = [None] * len(self._processes)
            dist.all_gather_object(problems, problem, group=self._distca_stages[0].group)
            of_ranks = [(rank, text) for rank, text in zip(self._processes, problems, strict=True) if text]
            problem = f"global rank {of_ranks[0][0]}: {of_ranks[0][1]}" if of_ranks else None
            self._agreed = problem is None
        if problem is not None:
            raise InvalidArgumentError(f"ScheduleTicks: {problem}")

    def _problem(self, ticks: Ticks, backward: bool) -> str | None:
        plans, table, stages = ticks.plans, ticks.plans.table, self._distca_stages
        if ticks is self._ticks:
            return "these ticks were run before; make Ticks(plans) of the plans of this step"
        pipeline = [ticks.context.global_ranks[ranks[plans.index]] for ranks in plans.stages]
        if pipeline != self._processes:
            return f"the stages of the plans are processes {pipeline}; the group of the stages has {self._processes}"
        found = [(stage.stage_index, stage.num_stages) for stage in stages]
        num_stages = table.stages * table.chunks
        expected = [(table.position(plans.stage, chunk), num_stages) for chunk in range(table.chunks)]
        if found != expected:
            return f"the stages (number, of how many) are {found}; by the plans they are {expected}, in that order"
        if table.microbatches != self._microbatches:
            return f"the plans have {table.microbatches} micro-batches, n_microbatches is {self._microbatches}"
        if table.has_backward != backward or torch.is_grad_enabled() < backward:
            if backward:
                return "step trains, which takes plans with backward, and gradients; eval(...) is for the others"
            return "an evaluation takes PipelinePlans(..., backward=False)"
        rows = {plans.rows(number) for number in range(table.microbatches)}
        for stage in stages:
            for name, tensors, is_end in _shapes(stage):
                if not tensors:
                    return f"stage {stage.stage_index} has no {name}; give PipelineStage example tensors of both kinds"
                if is_end:
                    continue
                if any(each.dtype.is_floating_point > each.requires_grad for each in tensors):
                    return f"{name} of stage {stage.stage_index} require no gradient; make them with requires_grad=True"
                if wrong := [n for n in rows if all(n not in each.shape for each in tensors)]:
                    return (
                        f"rank {plans.rank} has {wrong[0]} rows in a micro-batch, and {name} of stage "
                        f"{stage.stage_index} have shape {list(tensors[0].shape)}. PyTorch hands over tensors of one "
                        "shape. What to change: as many rows in all micro-batches, or stages and a schedule for others"
                    )
        return None

    def _order(self, table: TickTable) -> None:
        """Makes the actions of all ranks: in each tick its begin, and then the stage's work, or serving.

        PyTorch adds what hands over tensors, gathers parameters and reduces gradients. All ranks have two actions in a
        tick, so that it puts no receive after the tick of its send.
        """
        if self._table == list(table):
            return
        self._table, kinds = list(table), {"forward": _FORWARD, "backward": _BACKWARD}
        actions: dict[int, list[Any]] = {stage: [] for stage in range(table.stages)}
        for number, (phase, works) in enumerate(table):
            for stage, work in enumerate(works):
                begin, serve = _Action(stage, _TICK, number, ()), _Action(stage, _TICK, None, ())
                at = work and _Action(table.position(stage, work.chunk), kinds[phase], work.microbatch)
                actions[stage] += [begin, at or serve]
        if not table.has_backward:  # PyTorch refuses an order without it. It is taken out below.
            for position in reversed(range(table.stages * table.chunks)):
                every = [_Action(position, _BACKWARD, microbatch) for microbatch in range(table.microbatches)]
                actions[position % table.stages] += every
        self._prepare_schedule_with_comms(actions)
        [orders] = _private(self, "pipeline_order_with_comms")
        if not table.has_backward:
            for stage, order in orders.items():
                orders[stage] = [each for each in order if each.computation_type.name in _EVALUATION]

    def _tick(self, action: Any, _context: Any) -> None:
        assert self._ticks is not None
        if action.microbatch_index is None:
            self._ticks.current.serve()
        else:
            next(self._iteration)

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, *args: Any, **kwargs: Any) -> None:
        assert self._ticks is not None
        kwarg_mbs = [{**each, "plan": self._ticks.plan} for each in kwarg_mbs or [{}] * self._microbatches]
        super()._step_microbatches(arg_mbs, kwarg_mbs, *args, **kwargs)


def _shapes(stage: Any) -> list[tuple[str, Any, bool]]:
    """The examples of what a stage takes and makes, as PyTorch keeps them, and whether nobody hands that over."""
    kept = getattr(stage, "_user_meta", None)
    inputs = getattr(stage, "inputs_meta", None) if kept is None else kept.inputs  # the former in 2.10
    outputs = getattr(stage, "_outputs_meta", None) if kept is None else kept.outputs
    return [("input_args", inputs, stage.is_first), ("output_args", outputs, stage.is_last)]
