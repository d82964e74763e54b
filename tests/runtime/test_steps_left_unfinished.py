"""A step that a rank leaves unfinished is a fault that names the step on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, Batch, random_batch
from support.groups import loopback_group, outcomes
from support.step_ways import HEADS, Rows, spilled_plan


def _assert_abandoned(results: list[Any], contexts: list[distca.Context], batch: Batch, plan: distca.Plan) -> None:
    """Rank 0 left a step. All other ranks are told so, and so is whoever uses the context on rank 0."""
    for rank in range(1, len(contexts)):
        assert isinstance(results[rank], distca.PeerLeftError), results[rank]
        assert "rank 0 left step 1 (forward) unfinished" in str(results[rank])
        with pytest.raises(distca.ContextPoisonedError, match=r"rank 0 left step 1 \(forward\) unfinished"):
            Rows(batch, plan, contexts[rank]).whole()
    with pytest.raises(distca.ContextPoisonedError, match=r"step 1 \(forward\) of context .* was dispatched on rank 0"):
        Rows(batch, plan, contexts[0]).whole()


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_goes_out_of_use_is_a_fault_that_names_it_on_all_ranks(ranks: int, attended: bool) -> None:
    plan, batch = spilled_plan(ranks), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context, layer="middle")
        step = rows.dispatch()
        if attended:
            distca.attend(step)
        if rank == 0:
            del step
            gc.collect()
            return
        if not attended:
            distca.attend(step)
        rows.collect(step)
        rows.whole()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        _assert_abandoned(results, contexts, batch, plan)
        with pytest.raises(distca.ContextPoisonedError, match=r"never collected \(layer middle\)"):
            Rows(batch, plan, contexts[0]).whole()


def _give_other_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(1)


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("change", [torch.Tensor.zero_, _give_other_memory])
def test_an_input_that_is_changed_under_way_is_named(attended: bool, change: Callable[[torch.Tensor], object]) -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context)
        step = rows.dispatch()
        if attended:
            distca.attend(step)
        if rank == 0:
            with torch.no_grad():
                change(rows.k)
            go_on, part = (distca.collect, "collect") if attended else (distca.attend, "attend")
            with pytest.raises(distca.InvalidArgumentError, match=f"{part}: k was changed in place"):
                go_on(step)
            return
        if not attended:
            distca.attend(step)
        rows.collect(step)
        rows.whole()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        _assert_abandoned(results, contexts, batch, plan)


def _broken(*_: Any) -> None:
    raise ValueError("in the middle")


def test_a_backward_that_breaks_off_in_the_middle_of_a_step_is_a_fault_that_names_it_at_once() -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context)
        step = rows.dispatch()
        distca.attend(step)
        assert step._token is not None and step._token.grad_fn is not None
        if rank == 0:
            step._token.grad_fn.register_prehook(_broken)
        rows.collect(step)
        loss = rows.loss()
        if rank == 0:
            with pytest.raises(ValueError, match="in the middle"):
                loss.backward()
            return
        loss.backward()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        assert isinstance(results[1], distca.PeerLeftError), results[1]
        assert "rank 0 left step 2 (backward) unfinished" in str(results[1])
        with pytest.raises(distca.ContextPoisonedError, match=r"step 2 \(backward\) of context"):
            Rows(batch, plan, contexts[0]).whole()


def test_a_backward_that_breaks_off_on_all_ranks_between_overlapping_steps_is_named_by_the_next_step() -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows, steps = [Rows(batch, plan, context) for _ in range(2)], []
        before = [one.q for one in rows]
        for one in rows:
            one.q = one.q * 1.0
            steps.append(one.dispatch())
        for step in steps:
            distca.attend(step)
        for one, step in zip(rows, steps, strict=True):
            one.collect(step)
        rows[1].q.grad_fn.register_prehook(_broken)  # this runs after one of the two backward steps
        loss = rows[0].loss() + rows[1].loss()
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        assert before[0].grad is None
        rows[0].dispatch()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        assert all(isinstance(one, distca.ContextPoisonedError | distca.PeerLeftError) for one in results), results
        assert any("(backward) of context" in str(one) and "broke off" in str(one) for one in results), results
