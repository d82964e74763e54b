"""The plans of all ticks of an iteration: `PipelinePlans`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distca.arguments import check_type, is_whole, listed
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.pipeline.halves import HALVES, checked_halves
from distca.pipeline.memory import PipelineMemory, memory_of
from distca.pipeline.stats import PipelineStats, TickStats
from distca.pipeline.step_planner import StageStep, Step, StepPlanner
from distca.pipeline.tick_table import TickTable, Work, tick_table
from distca.planner.halves import Half, join_halves
from distca.planner.layout import Chunk, Layout, Window
from distca.planner.plan import Plan
from distca.planner.scores import Scores
from distca.registry import find_context

if TYPE_CHECKING:
    import torch

    from distca.context import Context


class PipelinePlans:
    """The plans of every tick of an iteration, seen from one rank.

    In a tick the stages hold different micro-batches, and all ranks of all stages compute their attention together. A
    step of a tick is one layer of every stage. Backward ticks hold other micro-batches on the other stages than forward
    ticks did. Therefore all plans are made before the first forward. They are pure functions of the arguments, the same
    on every rank to the last bit, and can be pickled.

    Args:
        layouts: for each micro-batch its rows over the ranks of one stage.
        heads: head shape and dtype of the layers.
        stages: for each stage its ranks in the context. Rank ``stages[s][r]`` holds what rank r of the layouts holds.
        layers: number of attention layers of each chunk of a stage: one number, or one for each stage.
        chunks: number of chunks of layers of each stage. With several, the micro-batches are a multiple of the stages.
        in_flight: the most micro-batches whose activations a stage may hold at one time, as in `tick_table`.
        backward: False makes the plans of the forward ticks only, for evaluation.
        windows: for each attention layer of the model, in order, its window, as in `distca.plans`: None, a number of
            rows, or a `distca.Chunk`. By default no layer has one. (The first chunks of all stages come before the
            second ones.)
        scores: for each attention layer of the model its mask, window, scale and softcap, in place of `windows`. Layers
            of different stages that share a step may differ in all of them.
        halves: for each micro-batch its two halves, ``[distca.halves(layout) for layout in layouts]``, if the stages
            run in `distca.PingPong`; or the function that makes them of a layout, such as `distca.halves`. Each half
            then has plans of its own, with ``overlap=True`` by default. A micro-batch has the same halves in forward
            and backward.
        across_stages: False balances attention inside each stage only, to compare. Idle stages then compute nothing.
            ``servers``, ``speeds`` and ``ranks_per_node`` cannot be given.
        context: the context that will run the plans, or its name, as in `distca.plan`.
        rank: the rank that the plans are seen from; by default the context's, or 0 without a context.
        options: the other arguments of `distca.plan`, but for ``mask``, ``window``, ``tasks``, ``label`` and
            ``retain_bytes``. (Keys cannot be retained, because a backward tick has other servers than the forward
            tick.)

    Attributes:
        table: the ticks.
        stages: as above.
        layouts: as above.
        halves: the two halves of each micro-batch, or None.
        parts: what each step has a plan for: ``(None,)``, or with halves ``(0, 1)``.
        layers: number of layers of each stage's chunks.
        depth: the steps of a tick without recomputation: the layers of the deepest stage's chunks.
        heads: head shape and dtype of the layers.
        rank: the rank that the plans are seen from.
        stage: the stage of that rank.
        index: the rank's number among those of its stage.

    Raises:
        InvalidArgumentError: an argument is out of range, or the layouts do not fit the stages.
        CapacityError: as in `distca.plan`.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        heads: Heads,
        *,
        stages: Sequence[Sequence[int]],
        layers: int | Sequence[int] = 1,
        chunks: int = 1,
        in_flight: int | None = None,
        backward: bool = True,
        windows: Sequence[Window] | None = None,
        scores: Sequence[Scores] | None = None,
        halves: Sequence[tuple[Half, Half]] | Callable[[Layout], tuple[Half, Half]] | None = None,
        across_stages: bool = True,
        context: Context | str | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        self.layouts, self.stages = _checked(layouts, stages)
        if isinstance(heads, Mapping):
            raise InvalidArgumentError(
                f"PipelinePlans: heads are a mapping from {[*heads]}; layers of all stages share the steps of a tick, "
                "and therefore must have the same heads"
            )
        for name in ("mask", "window", "tasks", "retain_bytes", "label"):
            if name in options:
                raise InvalidArgumentError(f"PipelinePlans: {name} = {options[name]!r} cannot be given; see its Args")
        for name in ("servers", "speeds", "ranks_per_node"):
            if not across_stages and options.get(name) is not None:
                raise InvalidArgumentError(
                    f"PipelinePlans: {name} = {options[name]!r} cannot be given with across_stages=False"
                )
        if rank is None:
            here = None if context is None else find_context(context)
            rank = 0 if here is None else here.rank
        self.num_ranks = sum(map(len, self.stages))
        if not is_whole(rank, 0, self.num_ranks - 1):
            raise InvalidArgumentError(f"PipelinePlans: rank = {rank!r}; 0 to {self.num_ranks - 1} are allowed")
        self.rank = rank
        self.stage, self.index = next((s, ranks.index(rank)) for s, ranks in enumerate(self.stages) if rank in ranks)
        self.layers = _numbers_of_layers(layers, len(self.stages))
        self.depth = max(self.layers)
        self._kinds = _kinds_of_layers(windows, scores, sum(self.layers) * chunks)
        self.table: TickTable = tick_table(
            len(self.stages), len(self.layouts), chunks=chunks, in_flight=in_flight, backward=backward
        )
        self.heads = heads
        made = [halves(layout) for layout in self.layouts] if callable(halves) else halves
        self.halves = None if made is None else checked_halves(made, self.layouts)
        options = {"heads": heads, "context": context, "rank": rank, "overlap": self.halves is not None, **options}
        self.parts: tuple[int | None, ...] = (None,) if halves is None else (0, 1)
        planners = [StepPlanner(self._layouts_of(part), self.stages, options, across_stages) for part in self.parts]
        #: The plans of each tick: those of its first step, of all parts, then those of the next one.
        self._plans = [self._plans_of(number, planners) for number in range(len(self.table))]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "stats"}

    def plan(self, tick: int, step: int, half: int | None = None) -> Plan:
        """The plan of one step of a tick. Several steps may share it. With halves, 0 or 1 says of which half."""
        if half not in self.parts:
            raise InvalidArgumentError(f"PipelinePlans: half = {half!r}; 0 or 1 with halves, None without them")
        return self._plans[tick][len(self.parts) * step + self.parts.index(half)]

    def chunk(self, tick: int, step: int) -> Chunk | None:
        """The chunks in which this rank's layer in that step of a tick attends, if it does."""
        work = self.table[tick].work[self.stage]
        of_stage = self._stage_step(work, self.stage, step)
        return None if of_stage is None else of_stage.chunk

    def label(self, tick: int, half: int | None = None) -> str:
        """The label of the plans of a tick, or of one half of it."""
        of_half = "" if half is None else f", {HALVES[half]}"
        return f"tick {tick} of {len(self.table)}, {self.table[tick].phase}{of_half}"

    def rows(self, microbatch: int) -> int:
        """Rows of a micro-batch on this rank."""
        return self.layouts[microbatch].num_rows(self.index)

    def split(
        self, microbatch: int, whole: torch.Tensor, *, dim: int = 0, fill: float = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of both halves of a micro-batch on this rank: `Half.take` of each."""
        first, second = self._halves_of(microbatch)
        return first.take(whole, self.index, dim=dim, fill=fill), second.take(whole, self.index, dim=dim, fill=fill)

    def join(self, microbatch: int, parts: Sequence[torch.Tensor], *, dim: int = 0) -> torch.Tensor:
        """The whole that `split` has split: the rows of both halves in their places. Rows of padding are 0."""
        return join_halves(parts, self._halves_of(microbatch), self.index, dim=dim)

    @functools.cached_property
    def stats(self) -> PipelineStats:
        """Loads, bytes and arenas of all ticks."""
        ticks = [
            TickStats(tick.phase, [each.stats for each in plans])
            for tick, plans in zip(self.table, self._plans, strict=True)
        ]
        return PipelineStats(ticks)

    def memory(
        self,
        *,
        layer_bytes: int = 0,
        hidden_bytes: int = 0,
        recompute: str | Sequence[int] | None = None,
        save_attention: bool = False,
    ) -> PipelineMemory:
        """The memory of the iteration on every rank, before anything runs. Printed, it is a table.

        Args:
            layer_bytes: bytes that a layer keeps of one row from its forward to its backward, without q, k, v, out and
                lse of core attention, which are counted apart.
            hidden_bytes: bytes of one row between two layers: the hidden size times the bytes of its dtype.
            recompute, save_attention: as in `Ticks`. Of a group of layers that is run again only the input is kept.

        Returns:
            The table. An output that `Ticks.run` has handed over counts until its backward.

        Raises:
            InvalidArgumentError: a number of bytes is negative, or `recompute` is wrong as in `Ticks`.

        Examples:
            >>> layouts = [distca.Layout.from_documents([[700], [400, 300]]) for _ in range(4)]
            >>> heads = distca.Heads(q=8, kv=2, dim=64)
            >>> plans = distca.pipeline.PipelinePlans(layouts, heads, stages=[[0, 1], [2, 3]], layers=2)
            >>> memory = plans.memory(layer_bytes=20_000, hidden_bytes=2048)
            >>> [rank.rows for rank in memory.ranks]  # the first stage holds three micro-batches, the last one
            [2100, 2100, 700, 700]
        """
        return memory_of(
            self,
            layer_bytes=layer_bytes,
            hidden_bytes=hidden_bytes,
            recompute=recompute,
            save_attention=save_attention,
        )

    def _layouts_of(self, part: int | None) -> list[Layout]:
        if self.halves is None or part is None:
            return self.layouts
        return [halves[part].layout for halves in self.halves]

    def _halves_of(self, microbatch: int) -> tuple[Half, Half]:
        if self.halves is None:
            raise InvalidArgumentError(
                "PipelinePlans: there are no halves; make the plans with halves=[distca.halves(layout) for layout in "
                "layouts]"
            )
        return self.halves[microbatch]

    def _plans_of(self, number: int, planners: Sequence[StepPlanner]) -> list[Plan]:
        tick = self.table[number]
        of_tick: dict[tuple[int | None, Step], Plan] = {}
        plans = []
        for number_of_step in range(self.depth):
            step = tuple(self._stage_step(work, stage, number_of_step) for stage, work in enumerate(tick.work))
            for part, planner in zip(self.parts, planners, strict=True):
                key = part, step
                if key not in of_tick:
                    made = planner.plan(step, self.label(number, part))
                    of_tick[key] = made if part is None else made.for_parts(part)
                plans.append(of_tick[key])
        return plans

    def _stage_step(self, work: Work | None, stage: int, step: int) -> StageStep | None:
        """What a stage has in a step of a tick."""
        if work is None or self.layers[stage] <= step:
            return None
        layer = sum(self.layers) * work.chunk + sum(self.layers[:stage]) + step
        return StageStep(work.microbatch, *self._kinds[layer])


def _checked(layouts: Any, stages: Any) -> tuple[list[Layout], list[list[int]]]:
    layouts = listed("PipelinePlans", "layouts", layouts, "a layout for each micro-batch")
    for layout in layouts:
        check_type("PipelinePlans", "a layout", layout, Layout, "distca.Layout.from_documents([[100, 20], [80]])")
    stages = checked_stages("PipelinePlans", stages)
    if not layouts:
        raise InvalidArgumentError("PipelinePlans: there is no micro-batch")
    for number, layout in enumerate(layouts):
        if layout.num_ranks != len(stages[0]):
            raise InvalidArgumentError(
                f"PipelinePlans: the layout of micro-batch {number} is of {layout.num_ranks} ranks, a stage has "
                f"{len(stages[0])}"
            )
    return layouts, stages


def checked_stages(function: str, stages: Any) -> list[list[int]]:
    """The ranks of each stage. Raises InvalidArgumentError unless each rank is in one stage, and all are as large."""
    stages = [
        listed(function, "a stage", ranks, "a list of its ranks")
        for ranks in listed(function, "stages", stages, "a list of ranks for each stage")
    ]
    if not stages:
        raise InvalidArgumentError(f"{function}: no stages")
    ranks = [rank for of_stage in stages for rank in of_stage]
    are_whole = all(is_whole(rank, 0) for rank in ranks)
    if not are_whole or sorted(ranks) != list(range(len(ranks))) or len({len(of_stage) for of_stage in stages}) != 1:
        raise InvalidArgumentError(
            f"{function}: stages = {stages}; each rank from 0 on once, and as many in every stage, are expected"
        )
    return stages


def _numbers_of_layers(layers: Any, stages: int) -> list[int]:
    of_stages = [layers] * stages if isinstance(layers, int) else listed("PipelinePlans", "layers", layers, "numbers")
    if len(of_stages) != stages or not all(is_whole(n, 1) for n in of_stages):
        raise InvalidArgumentError(
            f"PipelinePlans: layers = {layers!r}; a positive number, or one for each of {stages} stages, is expected"
        )
    return of_stages


def _kinds_of_layers(windows: Any, scores: Any, num_layers: int) -> list[tuple[Scores, Chunk | None]]:
    if scores is not None and windows is not None:
        raise InvalidArgumentError("PipelinePlans: windows are given, and scores as well; scores have windows")
    if scores is not None:
        of_layers = listed("PipelinePlans", "scores", scores, "a distca.Scores for each layer of the model")
        for of_layer in of_layers:
            check_type("PipelinePlans", "scores of a layer", of_layer, Scores, "distca.Scores()")
        kinds: list[tuple[Scores, Chunk | None]] = [(of_layer, None) for of_layer in of_layers]
    elif windows is not None:
        windows = listed("PipelinePlans", "windows", windows, "the window of each layer of the model")
        kinds = [(Scores(), of) if isinstance(of, Chunk) else (Scores(window=of), None) for of in windows]
    else:
        kinds = [(Scores(), None)] * num_layers
    if len(kinds) != num_layers:
        name = "windows" if scores is None else "scores"
        raise InvalidArgumentError(
            f"PipelinePlans: {name} of {len(kinds)} layers; the stages have {num_layers} layers in all their chunks"
        )
    return kinds
