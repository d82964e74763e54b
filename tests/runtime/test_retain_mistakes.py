"""Calls that lose or mix up what servers have retained are refused with what to call instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, random_batch, rows_of_rank, spill
from support.groups import loopback_group, outcomes
from support.retaining import ALL, HEADS, plan_of


def step_on_all_ranks(plan: distca.Plan, call: Callable[..., Any], **options: Any) -> list[str]:
    """What each rank is told by `call(q, k, v, plan, context)` or, if that returns, by the backward of its out."""
    batch = random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        call(q, k, v, plan.for_rank(rank), context)[0].nan_to_num().sum().backward()

    with loopback_group(plan, **options) as contexts:
        return [str(error) for error in outcomes(contexts, work)]


def test_the_raw_operator_refuses_a_plan_that_retains_before_anything_moves() -> None:
    plan = plan_of(spill(LENGTHS, 2))
    for told in step_on_all_ranks(
        plan, lambda *a: torch.ops.distca.core_attention(*a[:3], a[3].tensor, context=a[4].name)
    ):
        assert "distca InvalidArgumentError: the plan has retain_bytes" in told and "call distca.core_attention" in told


def test_a_backward_without_what_forward_has_kept_says_what_to_call() -> None:
    plan = plan_of(spill(LENGTHS, 2))

    def nothing_kept(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        return torch.ops.distca.core_attention_all(q, k, v, plan.tensor, retained_bytes=0, context=context.name)

    def not_handed_on(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        out, lse = (t.detach() for t in distca.core_attention(q, k, v, plan, context=context))
        torch.ops.distca.core_attention_backward(out, q, k, v, out, lse, plan.tensor, context=context.name)

    kept = plan.stats.retained_bytes
    for call, has in ((nothing_kept, "0"), (not_handed_on, "none")):
        for rank, told in enumerate(step_on_all_ranks(plan, call)):
            if kept[rank] > 0 or has == "none":
                assert f"needs the {kept[rank]} bytes that its forward step kept on this rank, and has {has}" in told
                assert "call distca.core_attention (or distca.dispatch) with inputs that need a gradient" in told


@pytest.mark.parametrize("of_plan", [0, ALL])
def test_keys_kept_for_another_plan_than_that_of_forward_are_refused(of_plan: int) -> None:
    layout = spill(LENGTHS, 2)
    forward, backward = plan_of(layout, retain_bytes=of_plan), plan_of(layout, balance=False)

    def call(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        return distca.core_attention(q, k, v, plan, plan_backward=backward.for_rank(plan.rank), context=context)

    for told in step_on_all_ranks(forward, call, heap_bytes=1 << 22):
        assert "plan_backward retains keys, but of another plan" in told and "without retain_bytes" in told


def test_a_rank_that_only_serves_is_told_to_retain_nothing() -> None:
    layout = distca.Layout([*(spill(LENGTHS, 2).segments(rank) for rank in range(2)), []])
    plan = plan_of(layout, servers=[1, 2], rank=2)
    for serve in (distca.serve, lambda plan, phase: distca.serve_ping_pong([(plan, plan)], phase)):
        with pytest.raises(
            distca.InvalidArgumentError, match=r"for rank 2, .*retain_bytes=\[\.\.\.\], 0 for this rank"
        ):
            serve(plan, "forward")
