"""The bytes of the heap on every rank, and of what is retained beside it, known before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distca import _C
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.stats import ArenaBytes, PlanStats
from distca.registry import find_context, get_context

if TYPE_CHECKING:
    from distca.context import Context

SLOTS = _C.NUM_SLOTS
"""Steps that may be under way at once. The heap is divided into as many slots."""
_LEAST_HEAP = 8 << 20  # the CPU's heaps take pages only as they are used, and GPUs have these bytes to spare
_PHASES = ("forward", "backward")


def default_heap_bytes(max_tokens: int, heads: Heads) -> int:
    """Bytes of a rank's heap by default, if the rank has at most `max_tokens` tokens.

    It is six times the rank's own rows of q, k, v, out and their gradients, at least 8 MiB, whatever the number of
    ranks.
    """
    row_bytes = 2 * (heads.q + heads.kv) * (heads.dim + heads.value_dim) * heads.dtype.itemsize
    return max(6 * max_tokens * row_bytes, _LEAST_HEAP)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of the heap for some plans. Printed, it is a table. `memory_report` makes it.

    The heap has two slots, so that the rows of two steps may be there at once. It has the same size on every rank, that
    of the neediest one, because peers write into it. distca also takes memory beside it: the kernel's scratch, returned
    tensors, and what plans with `retain_bytes` retain.

    Attributes:
        arenas: for each rank and phase, the largest arena that one of the plans has.
        slot_bytes: the largest of these arenas: what a slot must hold for these plans.
        heap_bytes: bytes of the heap: the context's, or without a context two slots of ``slot_bytes``.
        capacity: bytes of a slot of the context; None without one.
        imbalance: largest attention load over the mean, for each plan.
        wanted_slot_bytes: bytes that a slot needs so that no plan trades balance for memory.
        retained_bytes: for each rank, what it retains outside the heap from forward to backward, for all layers.
    """

    arenas: list[dict[str, ArenaBytes]]
    slot_bytes: int
    heap_bytes: int
    capacity: int | None
    imbalance: list[float]
    wanted_slot_bytes: int
    retained_bytes: list[int]

    @property
    def trades_balance(self) -> bool:
        """Whether a plan is less balanced than it was asked to be, because a slot holds no more."""
        return self.wanted_slot_bytes > self.slot_bytes

    def __str__(self) -> str:
        head = f"{'rank':>4}  {'phase':<8}  {'rows served':>13}  {'rows come home':>14}  {'scratch':>13}  {'arena':>13}"
        lines = [head]
        for rank, phases in enumerate(self.arenas):
            for phase, arena in phases.items():
                parts = f"{arena.server_in:>13,}  {arena.home_in:>14,}  {arena.scratch:>13,}  {arena.total:>13,}"
                lines.append(f"{rank:>4}  {phase:<8}  {parts}")
        room = "" if self.capacity is None else f" of {self.capacity:,}"
        lines.append(f"a slot needs {self.slot_bytes:,}{room} bytes; the heap of each rank has {self.heap_bytes:,}")
        if any(self.retained_bytes):
            most = max(self.retained_bytes)
            rank = self.retained_bytes.index(most)
            lines.append(f"beside the heap, up to {most:,} bytes (rank {rank}) are kept from forward to backward")
        if self.trades_balance:
            lines.append(
                f"memory costs balance: the largest load is {max(self.imbalance):.3f} of the mean, and slots of "
                f"{self.wanted_slot_bytes:,} bytes (heap_bytes={SLOTS * self.wanted_slot_bytes}) would mend it"
            )
        return "\n".join(lines)


def _is_short_of_memory(stats: PlanStats) -> bool:
    return stats.binding is not None and stats.binding.startswith("capacity")


def report(stats: Sequence[PlanStats], *, context: Context | str | None = None, layers: int = 1) -> MemoryReport:
    """`distca.memory_report` for the statistics of plans."""
    here = get_context() if context is None else find_context(context)
    if here is None and context is not None:
        raise InvalidArgumentError(f"memory_report: there is no context {context!r}")
    ranks = {len(s.load) for s in stats}
    if len(ranks) != 1:
        raise InvalidArgumentError(f"memory_report: plans for {sorted(ranks)} ranks; plans of one group are expected")
    if layers < 1:
        raise InvalidArgumentError(f"memory_report: layers = {layers}; at least 1 is allowed")
    (num_ranks,) = ranks
    if here is not None and context is not None and here.num_ranks != num_ranks:
        raise InvalidArgumentError(
            f"memory_report: plans for {num_ranks} ranks and context {here.name!r} of {here.num_ranks}"
        )
    if here is not None and here.num_ranks != num_ranks:
        here = None  # the default context is not the one of these plans
    arenas = [
        {phase: max((s.arena_bytes[phase][rank] for s in stats), key=lambda arena: arena.total) for phase in _PHASES}
        for rank in range(num_ranks)
    ]
    slot_bytes = max(s.slot_bytes for s in stats)
    return MemoryReport(
        arenas=arenas,
        slot_bytes=slot_bytes,
        heap_bytes=SLOTS * (slot_bytes if here is None else here.slot_bytes),
        capacity=None if here is None else here.slot_bytes,
        imbalance=[s.imbalance_after for s in stats],
        # A plan that memory made another one may be as balanced as asked for.
        wanted_slot_bytes=max([slot_bytes, *(s.wanted_slot_bytes for s in stats if _is_short_of_memory(s))]),
        retained_bytes=[layers * max(s.retained_bytes[rank] for s in stats) for rank in range(num_ranks)],
    )
