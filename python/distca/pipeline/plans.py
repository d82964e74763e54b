"""The plans of all ticks of an iteration: `PipelinePlans`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distca.arguments import check_type, is_whole, listed
from distca.errors import CapacityError, InvalidArgumentError
from distca.heads import Heads
from distca.pipeline.memory import PipelineMemory, memory_of
from distca.pipeline.stats import PipelineStats, TickStats
from distca.pipeline.tick_table import TickTable, Work, tick_table
from distca.planner.layout import Layout
from distca.planner.plan import Plan
from distca.planner.planning import plan as plan_of
from distca.registry import find_context

if TYPE_CHECKING:
    from distca.context import Context

#: The micro-batch of each stage that has rows in a step, or None.
_Microbatches = tuple[int | None, ...]


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
        windows: for each layer of a chunk its window, as in `distca.plan`. By default no layer has one.
        context: the context that will run the plans, or its name, as in `distca.plan`.
        rank: the rank that the plans are seen from; by default the context's, or 0 without a context.
        options: the other arguments of `distca.plan`, but for ``window``, ``tasks``, ``label`` and
            ``retain_bytes``. (Keys cannot
            be retained, because a backward tick has other servers than the forward tick.)

    Attributes:
        table: the ticks.
        stages: as above.
        layouts: as above.
        layers: number of layers of each stage's chunks.
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
        windows: Sequence[int | None] | None = None,
        context: Context | str | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        self.layouts, self.stages = _checked(layouts, stages)
        for name in ("window", "tasks", "retain_bytes", "label"):
            if name in options:
                raise InvalidArgumentError(f"PipelinePlans: {name} = {options[name]!r} cannot be given; see its Args")
        if rank is None:
            here = None if context is None else find_context(context)
            rank = 0 if here is None else here.rank
        self.num_ranks = sum(map(len, self.stages))
        if not is_whole(rank, 0, self.num_ranks - 1):
            raise InvalidArgumentError(f"PipelinePlans: rank = {rank!r}; 0 to {self.num_ranks - 1} are allowed")
        self.rank = rank
        self.stage, self.index = next((s, ranks.index(rank)) for s, ranks in enumerate(self.stages) if rank in ranks)
        self.layers = _numbers_of_layers(layers, len(self.stages))
        self._windows = _windows_of(windows, max(self.layers))
        self.table: TickTable = tick_table(
            len(self.stages), len(self.layouts), chunks=chunks, in_flight=in_flight, backward=backward
        )
        self.heads = heads
        planner = _Planner(self.layouts, self.stages, {"heads": heads, "context": context, "rank": rank, **options})
        self._plans = [self._plans_of(number, planner) for number in range(len(self.table))]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "stats"}

    def plan(self, tick: int, step: int) -> Plan:
        """The plan of one step of a tick. Several steps may share it."""
        return self._plans[tick][step]

    def label(self, tick: int) -> str:
        """The label of the plans of a tick."""
        return f"tick {tick} of {len(self.table)}, {self.table[tick].phase}"

    @property
    def depth(self) -> int:
        """The steps of a tick without recomputation: the layers of the deepest stage's chunks."""
        return len(self._windows)

    def rows(self, microbatch: int) -> int:
        """Rows of a micro-batch on this rank."""
        return self.layouts[microbatch].num_rows(self.index)

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

    def _plans_of(self, number: int, planner: _Planner) -> list[Plan]:
        tick = self.table[number]
        of_tick: dict[tuple[_Microbatches, int | None], Plan] = {}
        plans = []
        for step, window in enumerate(self._windows):
            key = self._microbatches(tick.work, step), window
            if key not in of_tick:
                of_tick[key] = planner.plan(*key, self.label(number))
            plans.append(of_tick[key])
        return plans

    def _microbatches(self, works: Sequence[Work | None], step: int) -> _Microbatches:
        return tuple(
            None if work is None or self.layers[stage] <= step else work.microbatch for stage, work in enumerate(works)
        )


class _Planner:
    """Makes the plans of an iteration's steps, and uses schedules again."""

    def __init__(self, layouts: list[Layout], stages: list[list[int]], options: dict[str, Any]) -> None:
        self._layouts, self._stages, self._options = layouts, stages, options
        #: The first plan of each kind, and the order in which its layout has the stages' documents.
        self._made: dict[tuple[_Microbatches, int | None], tuple[Plan, list[int]]] = {}
        self._identity = list(range(sum(map(len, stages))))
        self._mirror = list(self._identity)
        for ranks, others in zip(stages, reversed(stages), strict=True):
            for rank, other in zip(ranks, others, strict=True):
                self._mirror[rank] = other

    def plan(self, microbatches: _Microbatches, window: int | None, label: str) -> Plan:
        """The plan of a step in which the stages have rows of these micro-batches.

        Where a plan of the same micro-batches was made, or of those with the order of the stages reversed, its schedule
        is used again. Then nothing needs to be balanced.
        """
        num_stages = len(self._stages)
        for of_stages, servers in ((microbatches, self._identity), (microbatches[::-1], self._mirror)):
            if (of_stages, window) not in self._made or not _are_alike(servers, self._options):
                continue
            like, order = self._made[of_stages, window]
            if servers is self._mirror:
                order = [num_stages - 1 - stage for stage in order]
            with contextlib.suppress(CapacityError):  # mirrored, rows come home in another order of the ranks
                return self._noted(microbatches, window, order, like.scheduled_alike, servers, label)
        return self._noted(microbatches, window, list(range(num_stages)), self._planned, window, label)

    def _noted(
        self, microbatches: _Microbatches, window: int | None, order: list[int], make: Callable[..., Plan], *how: Any
    ) -> Plan:
        """Makes a plan of the layout that has the stages' documents in that order, and keeps the first of each kind."""
        made = make(self._joined(order, microbatches), *how)
        self._made.setdefault((microbatches, window), (made, order))
        return made

    def _planned(self, layout: Layout, window: int | None, label: str) -> Plan:
        return plan_of(layout, window=window, label=label, **self._options)

    def _joined(self, order: Sequence[int], microbatches: _Microbatches) -> Layout:
        parts = []
        for stage in order:
            microbatch = microbatches[stage]
            if microbatch is not None:
                parts.append((self._layouts[microbatch], self._stages[stage]))
        return Layout.join(parts, num_ranks=len(self._identity))


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
    if sorted(ranks) != list(range(len(ranks))) or len({len(of_stage) for of_stage in stages}) != 1:
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


def _windows_of(windows: Any, depth: int) -> list[int | None]:
    if windows is None:
        return [None] * depth
    windows = listed("PipelinePlans", "windows", windows, "the window of each layer of a chunk, or None for no window,")
    if len(windows) != depth:
        raise InvalidArgumentError(f"PipelinePlans: {len(windows)} windows for the {depth} layers of the deepest chunk")
    return windows


def _are_alike(servers: list[int], options: dict[str, Any]) -> bool:
    """Whether ranks that take each other's places have the same speed, both serve or neither, and nodes stay nodes."""
    speeds, given, ranks_per_node = (options.get(name) for name in ("speeds", "servers", "ranks_per_node"))
    if speeds is not None and any(speeds[rank] != speeds[other] for rank, other in enumerate(servers)):
        return False
    if given is not None and any((rank in given) != (other in given) for rank, other in enumerate(servers)):
        return False
    if ranks_per_node is None:
        return True
    nodes: dict[int, set[int]] = {}
    for rank, other in enumerate(servers):
        nodes.setdefault(rank // ranks_per_node, set()).add(other // ranks_per_node)
    return all(len(of_node) == 1 for of_node in nodes.values())
