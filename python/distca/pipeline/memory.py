"""The bytes that an iteration of a pipeline takes on every rank, known before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distca.arguments import is_number, is_whole
from distca.errors import CapacityError, InvalidArgumentError
from distca.pipeline.recomputation import groups_of_stages
from distca.planner.memory import SLOTS

if TYPE_CHECKING:
    from distca.heads import Heads
    from distca.pipeline.plans import PipelinePlans
    from distca.pipeline.tick_table import TickTable, Work

#: `smallest_slots` tries slots of these parts of the largest arena without a limit.
_PARTS = [part / 32 for part in range(31, 15, -1)]


class RankMemory(NamedTuple):
    """What one rank takes. Sizes are in bytes.

    Attributes:
        stage: the rank's stage.
        chunks: the most chunks whose activations it holds at one time.
        rows: the most rows that it holds at one time, summed over the chunks held. Micro-batches differ in rows.
        rows_1f1b: the same number for 1F1B with these micro-batches (interleaved 1F1B for several chunks).
        arena: the largest arena that a plan needs on this rank, over all ticks, steps and both phases.
        activations: what the layers hold at one time without core attention: of the chunks that wait for backward, of
            the layers that are being run again, and of inputs and gradients that came before they are used.
        attention: what core attention holds beside it: q, k, v, out and lse, or with `save_attention` out and lse.
    """

    stage: int
    chunks: int
    rows: int
    rows_1f1b: int
    arena: int
    activations: int
    attention: int


@dataclass(frozen=True)
class PipelineMemory:
    """The memory of an iteration on every rank. Printed, it is a table. `PipelinePlans.memory` makes it.

    Nothing else of distca grows with the rows but returned tensors. Keys are never retained in a pipeline, because a
    backward tick has other servers than the forward tick. Weights, gradients of weights, the optimizer, embedding and
    loss are the caller's.

    Attributes:
        ranks: what each rank takes.
        slot_bytes: the largest arena: what a slot of the heap must hold. The heap has the same size on all ranks.
        table: the ticks.
    """

    ranks: list[RankMemory]
    slot_bytes: int
    table: TickTable

    @property
    def heap_bytes(self) -> int:
        """Bytes of each rank's heap, as slots of `slot_bytes`: for ``distca.init(heap_bytes=...)``."""
        return SLOTS * self.slot_bytes

    @property
    def totals(self) -> list[int]:
        """Bytes of each rank: heap, activations and attention."""
        return [self.heap_bytes + rank.activations + rank.attention for rank in self.ranks]

    def imbalance(self, column: str) -> float:
        """The largest value over the mean of a column (an attribute of `RankMemory`, or ``"total"``); 1 if all are 0.

        Raises:
            InvalidArgumentError: there is no such column.
        """
        if column != "total" and column not in RankMemory._fields:
            raise InvalidArgumentError(
                f"PipelineMemory: column = {column!r}; {', '.join((*RankMemory._fields, 'total'))} are allowed"
            )
        values = self.totals if column == "total" else [getattr(rank, column) for rank in self.ranks]
        return max(values) * len(values) / sum(values) if any(values) else 1.0

    def __str__(self) -> str:
        names = ("chunks", "rows", "rows_1f1b", "arena", "activations", "attention", "total")
        lines = [[*rank[1:], total] for rank, total in zip(self.ranks, self.totals, strict=True)]
        columns = list(zip(*lines, strict=True))
        cells = [["rank", "stage", *(name.replace("rows_1f1b", "rows (1F1B)") for name in names)]]
        cells += [
            [str(number), str(rank.stage), *(f"{value:,}" for value in line)]
            for number, (rank, line) in enumerate(zip(self.ranks, lines, strict=True))
        ]
        cells.append(["largest", "", *(f"{max(column):,}" for column in columns)])
        cells.append(["mean", "", *(f"{sum(column) / len(column):,.0f}" for column in columns)])
        cells.append(["largest / mean", "", *(f"{self.imbalance(name):.2f}" for name in names)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        text = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
        text.append(
            f"{len(self.table)} ticks; chunks and rows are those held at one time, all else is in bytes; total: "
            f"activations, attention and a heap of {SLOTS} slots of {self.slot_bytes:,} on every rank; no keys are "
            "retained"
        )
        return "\n".join(text)


class _Kept(NamedTuple):
    """Bytes of a row: without core attention, and of core attention."""

    activations: int
    attention: int


def memory_of(
    plans: PipelinePlans, *, layer_bytes: int, hidden_bytes: int, recompute: Any, save_attention: bool
) -> PipelineMemory:
    """`PipelinePlans.memory`."""
    for name, value in (("layer_bytes", layer_bytes), ("hidden_bytes", hidden_bytes)):
        if not is_whole(value, 0):
            raise InvalidArgumentError(f"PipelinePlans.memory: {name} = {value!r}; a number of bytes is expected")
    groups = groups_of_stages("PipelinePlans.memory", recompute, plans.layers)
    arenas = plans.stats.arenas
    ranks: list[RankMemory] = [RankMemory(0, 0, 0, 0, 0, 0, 0)] * plans.num_ranks
    for stage, of_stage in enumerate(plans.stages):
        layers = plans.layers[stage]
        attention, results = _row_bytes(plans.heads)
        kept = _Kept(layers * layer_bytes, layers * attention)
        again = _Kept(0, 0)
        if groups:
            saved = results if save_attention else 0
            stay = layers - sum(min(end, layers) - begin for begin, end in groups if begin < layers)
            kept = _Kept(  # a padded group keeps an input as well
                len(groups) * hidden_bytes + stay * layer_bytes, (layers - stay) * saved + stay * attention
            )
            most = max((end - begin for begin, end in groups if begin < layers), default=0)
            again = _Kept(most * layer_bytes, most * (attention - saved))
        for index, rank in enumerate(of_stage):
            rows = [layout.num_rows(index) for layout in plans.layouts]
            held = _Held(plans.table, stage, rows)
            activations, of_attention = held.bytes(kept, again, hidden_bytes)
            ranks[rank] = RankMemory(
                stage, plans.table.in_flight(stage), held.most, held.most_1f1b, arenas[rank], activations, of_attention
            )
    return PipelineMemory(ranks, max(arenas), plans.table)


def _row_bytes(heads: Heads) -> tuple[int, int]:
    """Bytes that core attention keeps of a row: q, k, v, out and lse together, and out and lse alone."""
    lse = 4 * heads.q
    out = heads.q * heads.value_dim * heads.dtype.itemsize
    return heads.row_bytes + lse, out + lse


class _Held:
    """The rows that a rank holds in each tick."""

    def __init__(self, table: TickTable, stage: int, rows: Sequence[int]) -> None:
        """`rows` are those of each micro-batch on the rank."""
        self._table, self._stage, self._rows = table, stage, rows
        forward, backward = (self._works(phase) for phase in ("forward", "backward"))
        #: Rows that are held in each tick from a forward to its backward, both ticks included.
        self._in_flight = [0] * len(table)
        for work in backward:
            self._add(self._in_flight, work, *self._ticks_of(work))
        self.most = max(self._in_flight)
        self.most_1f1b = 0
        if backward:
            warm = table.in_flight_of_1f1b(stage)
            taken = list(itertools.accumulate(rows[work.microbatch] for work in forward))
            freed = [0, *itertools.accumulate(rows[work.microbatch] for work in backward)]
            self.most_1f1b = max(a - b for a, b in zip(taken[warm - 1 :], freed, strict=False))

    def _works(self, phase: str) -> list[Work]:
        works = (tick.work[self._stage] for tick in self._table if tick.phase == phase)
        return [work for work in works if work is not None]

    def _ticks_of(self, work: Work) -> tuple[int, int]:
        """The forward and the backward tick of a work."""
        forward, backward = (self._table.tick_of(phase, self._stage, work) for phase in ("forward", "backward"))
        return forward, backward

    def _add(self, to: list[int], work: Work, begin: int, last: int) -> None:
        """Adds the rows of a work to the ticks from `begin` to `last`."""
        for tick in range(begin, last + 1):
            to[tick] += self._rows[work.microbatch]

    def bytes(self, kept: _Kept, again: _Kept, hidden_bytes: int) -> _Kept:
        """The bytes in the tick in which both kinds together are most.

        Args:
            kept: what a row in flight keeps in all layers of a chunk.
            again: what a row takes in the layers that are run again at one time.
            hidden_bytes: what a row takes between two layers.
        """
        table, stage = self._table, self._stage
        between = [0] * len(table)  # rows that were handed over and are not used yet, or whose backward is to come
        for number, tick in enumerate(table):
            coming = table.handed_to(number, stage)
            if coming is not None:
                self._add(between, coming, number + 1, table.tick_of(tick.phase, stage, coming) - 1)
        last = table.stages * table.chunks - 1
        for work in self._works("backward"):
            if table.position(stage, work.chunk) != last:
                self._add(between, work, *self._ticks_of(work))
        most = _Kept(0, 0)
        for number, tick in enumerate(table):
            at_work, in_flight = tick.work[stage], self._in_flight[number]
            redone = self._rows[at_work.microbatch] if at_work is not None and tick.phase == "backward" else 0
            now = _Kept(
                in_flight * kept.activations + redone * again.activations + between[number] * hidden_bytes,
                in_flight * kept.attention + redone * again.attention,
            )
            most = max(most, now, key=sum)
        return most


def smallest_slots(make: Callable[..., PipelinePlans], *, imbalance: float = 1.05) -> PipelinePlans:
    """Plans whose largest arena is as small as is found at that balance.

    The heap has the same size on all ranks, that of the largest arena of any rank in any tick. A limit of the arenas
    (`capacity`) makes that tick a little less balanced, or moves other rows. This tries 16 limits, down to half of
    the largest arena, and takes the best.

    Args:
        make: makes the plans; called with ``capacity=`` (bytes) beside nothing else. For example
            ``functools.partial(PipelinePlans, layouts, heads, stages=stages)``.
        imbalance: the largest ``stats.imbalance_after`` that is taken, at least 1.

    Returns:
        The plans with the smallest arenas among those within `imbalance`, or those without a limit if none is.

    Raises:
        InvalidArgumentError: `imbalance` is below 1.
        DistcaError: as `make` raises.
    """
    if not is_number(imbalance, 1.0, float("inf")):
        raise InvalidArgumentError(f"smallest_slots: imbalance = {imbalance!r}; at least 1 is allowed")
    best = unlimited = make()
    for part in _PARTS:
        try:
            plans = make(capacity=max(1, int(part * unlimited.stats.slot_bytes)))
        except CapacityError:
            break
        if plans.stats.imbalance_after <= imbalance and plans.stats.slot_bytes < best.stats.slot_bytes:
            best = plans
    return best
