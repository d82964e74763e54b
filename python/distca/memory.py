"""What distca's heap takes on every rank, and what is retained beside it, stated before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from distca.arguments import check_type
from distca.context import SLOTS, Context, find_context, get_context
from distca.errors import InvalidArgumentError
from distca.planning import ArenaBytes, Plan


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of the symmetric heap for some plans; printed, it is a table. Made by `memory_report`.

    The heap has two slots, so that the rows of two steps may be there at once, and is as large on every rank as the
    neediest one wants it, for peers write into it. Beside it distca keeps the kernel's scratch, returned tensors, and
    what plans with `retain_bytes` keep.

    Attributes:
        arenas: of every rank, the largest arena that one of the plans has in each phase.
        slot_bytes: the largest of them: what a slot must hold for these plans.
        heap_bytes: what the heap takes: that of the context, else two such slots.
        capacity: bytes of a slot of the context; None without one.
        imbalance: largest attention load over the mean, for each plan.
        wanted_slot_bytes: what a slot would have to hold for no plan to trade balance for memory.
        retained_bytes: of every rank, what it keeps outside the heap from forward to backward, of all layers.
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
        """Whether a plan is less balanced than asked for because a slot holds no more."""
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


def memory_report(*plans: Plan, context: Context | str | None = None, layers: int = 1) -> MemoryReport:
    """States the bytes that these plans take on every rank; nothing runs.

    Args:
        plans: of one or several layouts of the same ranks, a batch each, say.
        context: the context that is to run them, or its name; by default the default context, if there is one.
        layers: how many calls of `core_attention` keep what their plan retains at the same time: the layers of a model.

    Raises:
        InvalidArgumentError: without a plan, for plans of different numbers of ranks, or for a context that is not
            open or has other ranks; unless there is a layer.
    """
    for plan in plans:
        check_type("memory_report", "a plan", plan, Plan, "distca.plan(layout, heads)")
    here = get_context() if context is None else find_context(context)
    if here is None and context is not None:
        raise InvalidArgumentError(f"memory_report: there is no context {context!r}")
    ranks = {plan.layout.num_ranks for plan in plans}
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
        here = None  # the default context has nothing to do with these plans
    stats = [plan.stats for plan in plans]
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
        wanted_slot_bytes=max(s.wanted_slot_bytes for s in stats),
        retained_bytes=[layers * max(s.retained_bytes[rank] for s in stats) for rank in range(num_ranks)],
    )


_PHASES = ("forward", "backward")
