"""Queued steps between hosts: rows for ranks that load and store do not reach are packed, and a network sends them.

A thread of each rank stands for the network. The results are those of the host, step by step.
"""

from __future__ import annotations

import pytest
import torch

import distca
from distca import testing
from distca.testing import _emulation
from support.batches import Batch, random_batch, random_tasks, rows_of_rank, scattered, spill
from support.groups import fault_of_check, forward_of_rank, loopback_group, on_all_ranks, outcomes, run_step

LENGTHS = (100, 3, 64, 130)
HEADS = distca.Heads(4, 2, 16, 24)


def _plan(ranks: int, seed: int, heads: distca.Heads = HEADS) -> distca.Plan:
    layout = scattered(LENGTHS, ranks, seed)
    return distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (3, 3), (4, 2), (8, 3)])
def test_steps_of_changing_plans_give_the_bits_of_steps_on_the_host(ranks: int, hosts: int, dtype: torch.dtype) -> None:
    heads = distca.Heads(4, 2, 16, 24, dtype)
    plans = [_plan(ranks, seed, heads) for seed in range(5)]
    batch = random_batch(LENGTHS, heads, 2)
    results = []
    for options in ({}, {"streams": True, "hosts": hosts}):
        with loopback_group(plans, **options) as contexts:
            results.append(
                on_all_ranks(contexts, lambda rank, context: [run_step(batch, plan, context) for plan in plans])
            )
    for on_host, queued in zip(*results, strict=True):
        for step_on_host, step in zip(on_host, queued, strict=True):
            for a, b in zip(step_on_host, step, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_into_the_send_arena_at_once_goes_in_parts() -> None:
    """A home sends 15 servers more than fits into its arena, which is as large as the slot of the neediest server."""
    ranks, heads = 16, distca.Heads(4, 4, 64)
    layout = distca.Layout([[(0, 0, 16 * 40)], *[[(rank, 0, 1)] for rank in range(1, ranks)]])
    tasks = [(0, 40 * i, 40 * (i + 1), 0, 4, i) for i in range(ranks)]
    plan = distca.plan(layout, heads, tasks=[*tasks, *[(rank, 0, 1, 0, 4, rank) for rank in range(1, ranks)]])
    sent = sum(t.bytes for t in plan.transfers if t.source == 0 and t.message == "forward_in")
    assert sent > 1.5 * plan.stats.slot_bytes
    batch = random_batch((16 * 40, *[1] * (ranks - 1)), heads, 2)
    results = []
    for options in ({}, {"streams": True, "hosts": ranks}):
        with loopback_group(plan, **options) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context)))
    for on_host, queued in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on_host, queued, strict=True))


def _overflowing(homes: int) -> distca.Plan:
    """A plan in which every fourth rank sends all others more than its send arena holds.

    A rank sends to the ranks after it first. Therefore each of these has others of them among those that come first.
    """
    ranks, rows, heads = 4 * homes, 24, distca.Heads(4, 4, 64)
    layout = distca.Layout([[(rank, 0, 1 if rank % 4 else rows * ranks)] for rank in range(ranks)])
    tasks = [
        (home, rows * i, rows * (i + 1), 0, heads.kv, (i + home) % ranks)
        for home in range(0, ranks, 4)
        for i in range(ranks)
    ]
    tasks += [(rank, 0, 1, 0, heads.kv, rank) for rank in range(ranks) if rank % 4]
    plan = distca.plan(layout, heads, tasks=tasks)
    for home in range(0, ranks, 4):
        sent = sum(t.bytes for t in plan.transfers if t.source == home and t.message == "forward_in")
        assert sent > 1.2 * plan.stats.slot_bytes
    return plan


def _overlapped(batch: Batch, plan: distca.Plan, context: distca.Context) -> list[torch.Tensor]:
    """Runs two steps and their backward; both are under way at once."""
    inputs = [rows_of_rank(batch, plan.layout, context.rank, t) for t in (batch.q, batch.k, batch.v)]
    leaves = [[t.clone().requires_grad_() for t in inputs] for _ in range(2)]
    steps = [distca.dispatch(*one, plan.for_rank(context.rank), context=context) for one in leaves]
    for step in steps:
        distca.attend(step)
    outs = [distca.collect(step)[0] for step in steps]
    sum(out.sum() for out in outs).backward()
    return [out.detach() for out in outs] + [t.grad for one in leaves for t in one]


@pytest.mark.parametrize("homes", [2, 3])
def test_ranks_that_send_each_other_more_than_their_arenas_hold_do_not_wait_for_each_other_for_ever(homes: int) -> None:
    """A full arena waits for credit of a rank that may wait in the same way. Therefore credit always leaves first."""
    plan = _overflowing(homes)
    ranks, lengths = plan.layout.num_ranks, plan.layout.document_lengths
    batch = random_batch(lengths, plan.heads, 2)
    for work in (
        lambda rank, context: run_step(batch, plan, context),
        lambda _, context: _overlapped(batch, plan, context),
    ):
        results = []
        for options in ({}, {"streams": True, "hosts": ranks, "timeout": 20.0}):
            with loopback_group(plan, **options) as contexts:
                results.append(on_all_ranks(contexts, work))
        for on_host, queued in zip(*results, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(on_host, queued, strict=True))


def test_a_peer_of_another_host_that_is_silent_or_dead_is_named() -> None:
    plan = distca.plan(spill(LENGTHS, 2), HEADS, tolerance=0.0, min_rows=1)
    batch = random_batch(LENGTHS, HEADS, 1)

    with loopback_group(plan, timeout=0.2, streams=True, hosts=2) as contexts:
        assert forward_of_rank(plan, batch, 0, contexts[0]).isnan().all()
        error = fault_of_check(contexts[0])
        assert isinstance(error, distca.PeerTimeoutError) and "waited 0.2 s for rank 1" in str(error), error
    with loopback_group(plan, timeout=60.0, streams=True, hosts=2) as contexts:
        _emulation.mark_died(contexts[1]._core)
        [result, _] = outcomes(
            contexts, lambda rank, context: forward_of_rank(plan, batch, 0, context) if rank == 0 else None
        )
        assert isinstance(result, distca.PeerDiedError) or result.isnan().all()
        assert "rank 1 died" in str(fault_of_check(contexts[0]))


def test_hosts_go_with_streams_on_the_cpu() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="hosts = 2 needs streams=True"):
        testing.loopback(2, max_tokens=8, heads=HEADS, hosts=2)
    with pytest.raises(distca.InvalidArgumentError, match="0 hosts"):
        testing.loopback(2, max_tokens=8, heads=HEADS, streams=True, hosts=0)
