"""Results that still leave a server when its step has ended: over a slow link, and by a thread for the rows.

What a step takes of the caller's tensors has left by then; here they are full of NaN at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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


def test_a_server_goes_on_while_its_results_leave_and_its_next_step_in_the_slot_waits_for_them() -> None:
    """Rank 1 computes for rank 0 in a first step. Nothing moves in the second, which gets the other slot."""
    layout = distca.Layout([[(0, 0, 64)], [(1, 0, 64)]])
    lent, at_home = (
        distca.plan(layout, HEADS, tasks=[(0, 0, 64, 0, 2, server), (1, 0, 64, 0, 2, 1)]) for server in (1, 0)
    )
    link = distca.Link(lent.stats.bytes["forward_out"] / LATE)
    ended: list[float] = []

    def steps(rank: int, context: distca.Context) -> None:
        for plan in (lent, at_home, at_home):
            tensors = [torch.zeros(64, *shape) for shape in ((4, 16), (2, 16), (2, 24))]
            distca.core_attention(*tensors, plan.for_rank(rank), context=context)
            if rank == 1:
                ended.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))

    contexts = testing.loopback(2, heads=HEADS, max_tokens=64, link=link)
    try:
        on_all_ranks(contexts, steps)
        results_have_left = max(end for *_, end in _emulation.take_transfers(contexts[1]._core))
    finally:
        for context in contexts:
            context.close()
    assert ended[0] < ended[1] < results_have_left < ended[2]
