"""`distca plan --heap`: the heap that batches need, found by planning them. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distca.errors import CapacityError
from distca.heads import Heads
from distca.planner.layout import Layout
from distca.planner.memory import SLOTS, default_heap_bytes
from distca.planner.plan import Plan

_HALVINGS = 6  # the smallest heap is found to 1/64 of the one above which no plan improves


def heap_summary(layouts: Sequence[Layout], heads: Heads, make_plan: Callable[..., Plan]) -> str:
    """A table of the `heap_bytes` that these batches need, and of what becomes of them in the default heap.

    Args:
        layouts: the layouts of the batches, all of one group's ranks; at least one.
        heads: the heads of the attention layers.
        make_plan: `distca.plan` with all arguments but ``layout`` and ``capacity``.
    """
    tokens = max(layout.num_rows(rank) for layout in layouts for rank in range(layout.num_ranks))
    wanted = max(make_plan(layout=layout).stats.slot_bytes for layout in layouts)
    default = default_heap_bytes(max(tokens, 1), heads)
    too_large, less_balanced = _shortfalls(layouts, make_plan, default // SLOTS)
    fate = ", ".join(
        f"{count} {text}" for count, text in ((too_large, "do not fit"), (less_balanced, "less balanced")) if count
    )
    rows = [
        ("batches", f"{len(layouts)}, of {layouts[0].num_ranks} ranks, at most {tokens:,} tokens a rank"),
        ("heap_bytes at which none is less balanced", f"{SLOTS * wanted:,}"),
        ("smallest such heap_bytes that was found", f"{SLOTS * _smallest(layouts, make_plan, wanted):,}"),
        ("default heap_bytes for these tokens", f"{default:,}"),
        ("batches in the default heap", fate or "all fit, none less balanced"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _shortfalls(layouts: Sequence[Layout], make_plan: Callable[..., Plan], slot_bytes: int) -> tuple[int, int]:
    """How many batches do not fit into slots of so many bytes, and how many are less balanced because of them."""
    bindings = [_binding(layout, make_plan, slot_bytes) for layout in layouts]
    return bindings.count("all"), bindings.count("balance")


def _binding(layout: Layout, make_plan: Callable[..., Plan], slot_bytes: int) -> str | None:
    """What the slot's size costs a batch: "all" if it does not fit, "balance" if it is less balanced, or None."""
    try:
        binding = make_plan(layout=layout, capacity=slot_bytes).stats.binding
    except CapacityError:
        return "all"
    return "balance" if binding is not None and binding.startswith("capacity") else None


def _smallest(layouts: Sequence[Layout], make_plan: Callable[..., Plan], wanted: int) -> int:
    """The smallest slot found in which no batch is bound, in bytes: a multiple of 64, as slots are.

    It can be smaller than the slot wanted without a capacity, because a plan under a capacity may move other rows.
    """
    too_small, enough = 0, wanted
    for _ in range(_HALVINGS):
        tried = (too_small + enough) // 2 // 64 * 64
        if tried <= too_small:
            break
        if any(_binding(layout, make_plan, tried) for layout in layouts):
            too_small = tried
        else:
            enough = tried
    return enough
