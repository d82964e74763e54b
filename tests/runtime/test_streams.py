"""Steps that are queued on streams, as on a GPU: two threads of each rank stand for the streams.

The results are those of the host. A fault shows as NaN at once, and as an error of the next call.
"""

from __future__ import annotations

import threading

import pytest
import torch

import distca
from distca import testing
from distca.testing import _emulation
from support.batches import (
    Batch,
    data_parallel,
    random_batch,
    random_tasks,
    rows_of_rank,
    scattered,
    spill,
    spill_with_empty_ranks,
)
from support.groups import fault_of_check, forward_of_rank, loopback_group, on_all_ranks, outcomes, run_step
from support.plan_reader import read_slice

LENGTHS = (100, 3, 64, 130)
HEADS = distca.Heads(4, 2, 16, 24)


def _plan(ranks: int, tolerance: float = 0.0) -> distca.Plan:
    return distca.plan(spill(LENGTHS, ranks), HEADS, tolerance=tolerance, min_rows=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("make_layout", [data_parallel, spill_with_empty_ranks, scattered])
def test_queued_steps_give_the_bits_of_steps_on_the_host(make_layout, ranks: int, dtype: torch.dtype) -> None:
    heads = distca.Heads(4, 2, 16, 24, dtype)
    layout = make_layout(LENGTHS, ranks, 5)
    tasks = random_tasks(layout, heads.kv, 3)  # tasks of ranges of heads are among them
    plan = distca.plan(layout, heads, tasks=tasks)
    batch = random_batch(LENGTHS, heads, 2)
    results = []
    for streams in (False, True):
        with loopback_group(plan, streams=streams) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context, fused=True)))
    for on_host, queued in zip(*results, strict=True):
        for a, b in zip(on_host, queued, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_gradients_that_come_home_in_rounds_give_the_bits_of_the_host() -> None:
    heads = distca.Heads(2, 1, 8)
    plan = distca.plan(spill((1500, 100), 8), heads, tolerance=0.0, min_rows=1)
    assert max(read_slice(plan.for_rank(rank).tensor.tolist()).header.num_rounds for rank in range(8)) > 2
    batch = random_batch((1500, 100), heads, 2)
    results = []
    for streams in (False, True):
        with loopback_group(plan, streams=streams) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context)))
    for on_host, queued in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on_host, queued, strict=True))


# ---- faults


def _assert_nothing_came_out(result: torch.Tensor | BaseException, kind: type[Exception]) -> None:
    assert isinstance(result, kind) or result.isnan().all(), result


def _right(batch: Batch) -> list[torch.Tensor]:
    """What the ranks return if nothing goes wrong, whatever the plan."""
    plan = _plan(3)
    with loopback_group(plan) as contexts:
        return on_all_ranks(contexts, lambda rank, context: forward_of_rank(plan, batch, rank, context))


@pytest.mark.parametrize("odd_one", [0, 1, 2])
def test_of_ranks_with_different_plans_one_says_so_at_once_and_the_others_return_nothing_wrong(odd_one: int) -> None:
    plan, other = _plan(3), _plan(3, tolerance=0.3)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group([plan, other], timeout=60.0, streams=True) as contexts:
        results = outcomes(
            contexts, lambda rank, context: forward_of_rank(other if rank == odd_one else plan, batch, rank, context)
        )
        assert any(isinstance(result, distca.PlanMismatchError) for result in results), results
        for result, right, context in zip(results, _right(batch), contexts, strict=True):
            # A rank that needed no row of the odd one may be done already.
            if not (isinstance(result, torch.Tensor) and torch.equal(result, right)):
                _assert_nothing_came_out(result, distca.PlanMismatchError)
            fault = fault_of_check(context)
            assert isinstance(fault, distca.PlanMismatchError | distca.ContextPoisonedError), fault
            assert plan.digest in str(fault) and other.digest in str(fault), fault


def test_ranks_that_exchange_rows_and_differ_say_so_though_their_neighbours_come_later() -> None:
    # Of four ranks, 0 and 2 compute each other's document. The waits on the streams do not compare.
    layout = distca.Layout([[(rank, 0, 64)] for rank in range(4)])
    plan = distca.plan(layout, HEADS, tasks=[(rank, 0, 64, 0, 2, (2, 1, 0, 3)[rank]) for rank in range(4)])
    batch = random_batch(layout.document_lengths, HEADS, 1)
    have_left = [threading.Event(), threading.Event()]

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        if rank % 2 == 1:
            assert all(left.wait(60) for left in have_left)
        try:
            q, k, v = (rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v))
            return distca.core_attention(q, k, v, plan.for_rank(rank), context=context, scale=1.0 + rank // 2)[0]
        finally:
            if rank % 2 == 0:
                have_left[rank // 2].set()

    with loopback_group(plan, timeout=60.0, streams=True) as contexts:
        results = outcomes(contexts, work)
    assert any(isinstance(results[rank], distca.PlanMismatchError) for rank in (0, 2)), results
    for result in results:
        _assert_nothing_came_out(result, distca.PlanMismatchError)


def test_a_silent_peer_is_a_timeout_that_says_who_waited_for_whom_for_what_and_what_was_seen() -> None:
    plan = _plan(2)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=0.2, streams=True) as contexts:
        assert forward_of_rank(plan, batch, 0, contexts[0]).isnan().all()
        fault = fault_of_check(contexts[0])
        assert isinstance(fault, distca.PeerTimeoutError)
        for words in ("rank 0 of 2, step 1 (forward)", "waited 0.2 s for rank 1", "seen step 0", "expected step 1"):
            assert words in str(fault)
        assert "credit" in str(fault) or "rows" in str(fault)
        with pytest.raises(distca.PeerTimeoutError, match="rank 0 gave up waiting for rank 1"):
            forward_of_rank(plan, batch, 1, contexts[1])
        with pytest.raises(distca.ContextPoisonedError, match="waited 0.2 s for rank 1"):
            forward_of_rank(plan, batch, 0, contexts[0])


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_peer_that_died_is_named_to_all_others_though_only_their_streams_wait_for_it(steps_before: int) -> None:
    plan = _plan(3)
    batch = random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> torch.Tensor | None:
        for _ in range(steps_before):
            if (out := forward_of_rank(plan, batch, rank, context)).isnan().any():
                return out  # the rank may learn of the death before its step is over
        if rank == 1:
            _emulation.mark_died(context._core)
            return None
        return forward_of_rank(plan, batch, rank, context)

    with loopback_group(plan, timeout=60.0, streams=True) as contexts:
        results = outcomes(contexts, work)
        for rank in (0, 2):
            _assert_nothing_came_out(results[rank], distca.PeerDiedError)
            fault = fault_of_check(contexts[rank])
            assert isinstance(fault, distca.PeerDiedError | distca.ContextPoisonedError), fault
            assert "rank 1 died" in str(fault) and f"rank {rank} of 3" in str(fault)


def test_a_peer_that_closed_its_context_is_named() -> None:
    plan = _plan(2)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=60.0, streams=True) as contexts:
        contexts[1].close()
        with pytest.raises(distca.PeerLeftError, match="rank 1 closed its context and owes"):
            forward_of_rank(plan, batch, 0, contexts[0])


def test_what_does_not_go_with_streams_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="streams=True, or a GPU, excludes reorder_seed"):
        testing.loopback(2, max_tokens=8, heads=HEADS, streams=True, reorder_seed=1)
    with pytest.raises(distca.InvalidArgumentError, match='attention = "flash" has no queued steps on the CPU'):
        testing.loopback(2, max_tokens=8, heads=HEADS, streams=True, attention="flash")
