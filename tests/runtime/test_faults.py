"""Faults between the ranks of a group: who says what, and that the context is abandoned afterwards.

The ranks are threads here; test_process_death.py has processes that really die.
"""

from __future__ import annotations

import pytest
import torch

import distca
from distca.testing import _emulation
from support.batches import Batch, random_batch, rows_of_rank, spill
from support.groups import loopback_group, on_all_ranks, outcomes

HEADS = distca.Heads(4, 2, 16, 24)
LENGTHS = (100, 3, 64)


def _plan(ranks: int = 2, tolerance: float = 0.0) -> distca.Plan:
    return distca.plan(spill(LENGTHS, ranks), HEADS, tolerance=tolerance, min_rows=1)


def _forward(plan: distca.Plan, batch: Batch, rank: int, context: distca.Context) -> torch.Tensor:
    q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
    return distca.core_attention(q, k, v, plan.for_rank(rank), context=context)[0]


def _assert_poisoned(contexts: list[distca.Context], plan: distca.Plan, batch: Batch) -> None:
    for rank, context in enumerate(contexts):
        with pytest.raises(distca.ContextPoisonedError, match=f'"{context.name}" was abandoned after a fault'):
            _forward(plan, batch, rank, context)


@pytest.mark.parametrize("reorder_seed", [None, 1, 2])
def test_ranks_that_disagree_on_the_plan_all_learn_both_digests(reorder_seed: int | None) -> None:
    plans = [_plan(), _plan(tolerance=0.3)]
    assert plans[0].digest != plans[1].digest
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plans, timeout=20.0, reorder_seed=reorder_seed) as contexts:
        results = outcomes(contexts, lambda rank, context: _forward(plans[rank], batch, rank, context))
        for rank, error in enumerate(results):
            assert isinstance(error, distca.PlanMismatchError), error
            assert plans[0].digest in str(error) and plans[1].digest in str(error)
            assert f"rank {rank} of 2" in str(error)
        _assert_poisoned(contexts, plans[0], batch)


@pytest.mark.parametrize("odd_one", [0, 2, 4])
def test_one_of_several_ranks_with_another_plan_is_found_by_all(odd_one: int) -> None:
    plan, other = _plan(5), _plan(5, tolerance=0.3)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group([plan, other], timeout=20.0) as contexts:
        results = outcomes(
            contexts, lambda rank, context: _forward(other if rank == odd_one else plan, batch, rank, context)
        )
        assert all(isinstance(error, distca.PlanMismatchError) for error in results), results
        assert all(plan.digest in str(error) and other.digest in str(error) for error in results)
        _assert_poisoned(contexts, plan, batch)


def test_a_sender_that_needs_no_credit_and_has_another_plan_is_found_before_its_rows_are_used() -> None:
    """Rank 0 sends to rank 2, whose slot it knows to be free. Rank 2 expects no rows, and no other rank takes part."""
    layout = distca.Layout([[(rank, 0, 64)] for rank in range(4)])
    at_home = [(rank, 0, 64, 0, HEADS.kv, rank) for rank in range(4)]
    lent = distca.plan(layout, HEADS, tasks=[(0, 0, 64, 0, HEADS.kv, 2), *at_home[1:]])
    own = distca.plan(layout, HEADS, tasks=at_home)
    batch = random_batch((64,) * 4, HEADS, 1)

    def dispatch(plan: distca.Plan, rank: int, context: distca.Context) -> distca.Step:
        q, k, v = (rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v))
        return distca.dispatch(q, k, v, plan.for_rank(rank), context=context)

    for first, second in ((0, 2), (2, 0)):
        with loopback_group([lent, own], timeout=20.0) as contexts:
            for _ in range(2):
                on_all_ranks(contexts, lambda rank, context: _forward(lent, batch, rank, context))
            plans = {0: lent, 2: own}
            step = dispatch(plans[first], first, contexts[first])
            with pytest.raises(distca.PlanMismatchError, match=f"rank {first} came to this step with another plan"):
                dispatch(plans[second], second, contexts[second])
            with pytest.raises(distca.PlanMismatchError, match=f"rank {second} found that rank {first}"):
                distca.attend(step)


def test_one_rank_in_forward_and_another_in_backward_is_a_mismatch_that_says_so() -> None:
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        out = _forward(plan, batch, rank, context)
        if rank == 0:
            out.sum().backward()
        else:
            _forward(plan, batch, rank, context)

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        assert all(isinstance(error, distca.PlanMismatchError) for error in results), results
        assert any("forward of plan" in str(error) and "backward of plan" in str(error) for error in results)
        _assert_poisoned(contexts, plan, batch)


def test_a_silent_peer_is_a_timeout_that_says_who_waited_for_whom_for_what_and_what_was_seen() -> None:
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=0.2) as contexts:
        with pytest.raises(distca.PeerTimeoutError) as caught:
            _forward(plan, batch, 0, contexts[0])
        for words in ("rank 0 of 2, step 1 (forward)", "waited 0.2 s for rank 1", "seen step 0", "expected step 1"):
            assert words in str(caught.value)
        assert "credit" in str(caught.value) or "rows" in str(caught.value)
        with pytest.raises(distca.PeerTimeoutError, match="rank 0 gave up waiting for rank 1"):
            _forward(plan, batch, 1, contexts[1])
        _assert_poisoned(contexts, plan, batch)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_peer_that_died_is_named_to_all_others(steps_before: int) -> None:
    plan = _plan(3)
    batch = random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        for _ in range(steps_before):
            _forward(plan, batch, rank, context)
        if rank == 1:
            _emulation.mark_died(context._core)
            return
        _forward(plan, batch, rank, context)

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        for rank in (0, 2):
            assert isinstance(results[rank], distca.PeerDiedError), results[rank]
            assert "rank 1 died" in str(results[rank]) and f"rank {rank} of 3" in str(results[rank])
            with pytest.raises(distca.ContextPoisonedError, match="rank 1 died"):
                _forward(plan, batch, rank, contexts[rank])


def test_a_peer_that_closed_its_context_is_named() -> None:
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=20.0) as contexts:
        contexts[1].close()
        with pytest.raises(distca.PeerLeftError, match="rank 1 closed its context"):
            _forward(plan, batch, 0, contexts[0])


def test_outputs_of_a_step_that_failed_never_appear() -> None:
    """The failing rank raises in forward. The backward of an earlier forward on the poisoned context raises too."""
    plan = _plan()
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=20.0) as contexts:
        outs = on_all_ranks(contexts, lambda rank, context: _forward(plan, batch, rank, context))
        _emulation.mark_died(contexts[1]._core)
        with pytest.raises(distca.PeerDiedError):
            _forward(plan, batch, 0, contexts[0])
        with pytest.raises(distca.ContextPoisonedError):
            outs[0].sum().backward()
