"""Results that still leave a server when its step has ended: over a slow link, and by a thread for the rows.

What a step takes of the caller's tensors has left by then; here they are full of NaN at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch

import distca
from distca import testing
from distca.testing import _emulation
from support.batches import NAN, random_batch, random_tasks, rows_of_rank, scattered
from support.groups import on_all_ranks, run_step

LENGTHS = (100, 3, 64, 130)
HEADS = distca.Heads(4, 2, 16, 24)
RANKS = 4
PLANS = [
    distca.plan(layout, HEADS, tasks=random_tasks(layout, HEADS.kv, seed))
    for seed, layout in enumerate(scattered(LENGTHS, RANKS, seed) for seed in range(8))
]
BATCH = random_batch(LENGTHS, HEADS, 2)
#: A step is on this link for some 10 milliseconds.
SLOW = distca.Link(bytes_per_second=5e6, latency=1e-3)
#: Seconds for which results are on their way.
LATE = 0.5


def _tensors(plan: distca.Plan, rank: int) -> list[torch.Tensor]:
    return [rows_of_rank(BATCH, plan.layout, rank, tensor) for tensor in (BATCH.q, BATCH.k, BATCH.v)]


def whole_steps(rank: int, context: distca.Context) -> list[torch.Tensor]:
    """Forward and backward steps, and then forward steps alone."""
    found = [tensor for plan in PLANS for tensor in run_step(BATCH, plan, context)]
    for plan in PLANS:
        tensors = _tensors(plan, rank)
        found += distca.core_attention(*tensors, plan.for_rank(rank), context=context)
        for tensor in tensors:
            tensor.fill_(NAN)
    return found


def halves_in_turns(rank: int, context: distca.Context) -> list[torch.Tensor]:
    """Two steps at a time, in the order of calls of a ping-pong."""
    found: list[torch.Tensor] = []
    for halves in zip(PLANS[::2], PLANS[1::2], strict=True):
        of_halves = [_tensors(plan, rank) for plan in halves]
        steps = [
            distca.dispatch(*tensors, plan.for_rank(rank), context=context)
            for tensors, plan in zip(of_halves, halves, strict=True)
        ]
        for step in steps:
            distca.attend(step)
        for step, tensors in zip(steps, of_halves, strict=True):
            found += distca.collect(step)
            for tensor in tensors:
                tensor.fill_(NAN)
    return found


@pytest.mark.parametrize("steps", [whole_steps, halves_in_turns])
@pytest.mark.parametrize("late", [{"link": SLOW}, {"progress_thread": True}], ids=["slow link", "thread for the rows"])
def test_steps_whose_results_leave_late_have_the_bits_of_others(
    steps: Callable[[int, distca.Context], list[torch.Tensor]], late: dict[str, object]
) -> None:
    # The other tests fill arenas with NaN after every step, and wait for what leaves before they do.
    slot_bytes = max(plan.stats.slot_bytes for plan in PLANS)
    found = []
    for options in ({}, late):
        contexts = testing.loopback(RANKS, heads=HEADS, max_tokens=1, heap_bytes=2 * slot_bytes, **options)
        try:
            found.append(on_all_ranks(contexts, steps))
        finally:
            for context in contexts:
                context.close()
    for at_once, later in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(at_once, later, strict=True))


def steps_of(plans: Sequence[distca.Plan], link: distca.Link | None) -> tuple[list[list[torch.Tensor]], list[float]]:
    """Forward steps over a link: their out and lse on each rank, and when rank 2 had ended each."""
    ended: list[float] = []

    def steps(rank: int, context: distca.Context) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for plan in plans:
            generator = torch.Generator().manual_seed(rank)
            rows = plan.for_rank(rank).num_rows
            tensors = [torch.randn(rows, *shape, generator=generator) for shape in ((4, 16), (2, 16), (2, 24))]
            found += distca.core_attention(*tensors, plan.for_rank(rank), context=context)
            for tensor in tensors:
                tensor.fill_(NAN)
            if rank == 2:
                ended.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        return found

    contexts = testing.loopback(3, heads=HEADS, max_tokens=136, heap_bytes=1 << 20, link=link)
    try:
        found = on_all_ranks(contexts, steps)
        transfers = [transfer for context in contexts for transfer in _emulation.take_transfers(context._core)]
    finally:
        for context in contexts:
            context.close()
    return found, [*ended, max((end for *_, end in transfers), default=0)]


def _plan(*tasks: tuple[int, int, int, int]) -> distca.Plan:
    """A plan with tasks of all heads. Rank 1 has a long document; a short one lies on ranks 0 and 2."""
    layout = distca.Layout([[(1, 0, 8)], [(0, 0, 64)], [(1, 8, 16)]])
    return distca.plan(layout, HEADS, tasks=[(document, a, b, 0, 2, server) for document, a, b, server in tasks])


#: Nothing is lent.
AT_HOME = _plan((0, 0, 64, 1), (1, 0, 8, 0), (1, 8, 16, 2))
#: Rank 2 computes both documents. The results of rank 0 leave first, those of rank 1 take `LATE` seconds.
LENT = _plan((0, 0, 64, 2), (1, 0, 16, 2))
#: The same, but for less of the long document. Rows of the short one, of rank 0 and of rank 2 itself, then lie where
#: results of the long one lay.
LENT_LESS = _plan((0, 0, 24, 2), (0, 24, 64, 1), (1, 0, 16, 2))
#: Rank 2 puts values of its own rows into a block with others, where those results lay.
MIXED_BLOCK = distca.plan(distca.Layout([[(0, 0, 136)], [], [(0, 136, 144)]]), HEADS, tasks=[(0, 0, 144, 0, 2, 2)])
#: Rank 0 sends keys, and gets nothing back.
KEYS = _plan((0, 0, 64, 1), (1, 0, 8, 0), (1, 8, 16, 1))


def equal(ones: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("last", [LENT_LESS, MIXED_BLOCK], ids=["rows of a home", "rows of the server"])
def test_nobody_writes_where_results_lie_that_have_not_left(last: distca.Plan) -> None:
    """Neither a home that has its results and comes to the next step in the slot, nor the server itself."""
    plans = [LENT, AT_HOME, last]
    found, _ = steps_of(plans, distca.Link(64 * 4 * 25 * 4 / LATE))
    assert equal(found, steps_of(plans, None)[0])


def test_a_step_ends_when_its_tensors_have_been_read_also_where_nothing_comes_back() -> None:
    found, _ = steps_of([KEYS], distca.Link(8 * 2 * 40 * 4 / LATE))
    assert equal(found, steps_of([KEYS], None)[0])


def test_a_server_goes_on_while_its_results_leave() -> None:
    _, (first, second, last) = steps_of([LENT, AT_HOME], distca.Link(64 * 4 * 25 * 4 / LATE))
    assert first < second < last
