"""Softcap and attention sinks over ranks are as exact as PyTorch's, and the same on all ranks of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, Batch, random_batch, random_tasks, rows_of_rank, scattered
from support.groups import loopback_group, on_all_ranks, outcomes, together
from support.oracle import NAMES, ErrorPool
from support.score_features import eager_attention, random_sinks

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _step(batch: Batch, plan: distca.Plan, sinks: torch.Tensor, softcap: float) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv in document order, and the sum of the ranks' gradients of their sinks."""

    def work(rank: int, context: distca.Context) -> Any:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        mine = sinks.clone().requires_grad_()
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, softcap=softcap, sinks=mine)
        out.backward(rows_of_rank(batch, plan.layout, rank, batch.dout).nan_to_num())
        return (out.detach(), lse, q.grad, k.grad, v.grad), mine.grad

    with loopback_group(plan, reorder_seed=3) as contexts:
        results = on_all_ranks(contexts, work)
    whole = together(batch.lengths, plan.layout, [tensors for tensors, _ in results])
    return (*whole, sum(gradient for _, gradient in results))


@DTYPES
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_softcap_and_sinks_are_as_exact_as_pytorch_wherever_rows_are_computed(
    softcap: float, dtype: torch.dtype
) -> None:
    shape = distca.Heads(8, 2, 32, 24, dtype=dtype)
    pool = ErrorPool(dtype)
    rounding = 2e-6 if dtype == torch.float32 else 2e-2
    for seed in (1, 2):
        batch, sinks = random_batch(LENGTHS, shape, seed), random_sinks(shape.q, seed)
        layout = scattered(LENGTHS, 3, seed)
        plans = [
            distca.plan(layout, shape, tolerance=0.0, min_rows=1),
            distca.plan(layout, shape, tasks=random_tasks(layout, shape.kv, seed)),
            distca.plan(layout, shape, balance=False),
        ]
        results = [_step(batch, plan, sinks, softcap) for plan in plans]
        exact = eager_attention(batch, torch.float64, softcap, sinks)
        for name, first, *others in zip(NAMES[:3], *results, strict=False):
            assert all(torch.equal(first, other) for other in others), name
        for ours in results:
            torch.testing.assert_close(ours[5].double(), exact[5], rtol=rounding, atol=20 * rounding)
        pool.add(results[1][:5], eager_attention(batch, dtype, softcap, sinks)[:5], exact[:5])
    # Unfused attention takes delta from the probabilities, and fused attention from the rounded output: see
    # score_features.py.
    pool.check(1.5 if dtype == torch.float32 else 1.1)


def test_a_server_without_rows_serves_with_softcap_and_sinks() -> None:
    shape = distca.Heads(4, 2, 16)
    batch, sinks = random_batch((200,), shape, 5), random_sinks(4, 5)
    plan = distca.plan(distca.Layout([[(0, 0, 200)], []]), shape, servers=[1])

    def work(rank: int, context: distca.Context) -> Any:
        if rank == 0:
            q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
            out, lse = distca.core_attention(q, k, v, plan.for_rank(0), context=context, softcap=3.0, sinks=sinks)
            out.backward(batch.dout)
            return out.detach(), lse, q.grad, k.grad, v.grad
        for phase in ("forward", "backward"):
            distca.serve(plan.for_rank(1), phase, context=context, softcap=3.0)
        return ()

    with loopback_group(plan) as contexts:
        ours = on_all_ranks(contexts, work)[0]
    for name, a, b in zip(NAMES, ours, eager_attention(batch, torch.float64, 3.0, sinks), strict=False):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_sinks_are_those_of_a_rank_s_own_rows() -> None:
    shape = distca.Heads(4, 2, 16)
    batch = random_batch((100, 30, 60), shape, 6)
    plan = distca.plan(distca.Layout.from_documents([[100], [30], [60]]), shape, tolerance=0.0, min_rows=1)
    all_sinks = [random_sinks(4, 7), None, random_sinks(4, 8)]

    def work(rank: int, context: distca.Context) -> Any:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        sinks = all_sinks[rank]
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, sinks=sinks)
        out.backward(rows_of_rank(batch, plan.layout, rank, batch.dout))
        return out.detach(), lse, q.grad, k.grad, v.grad

    with loopback_group(plan) as contexts:
        ours = on_all_ranks(contexts, work)
    assert plan.stats.bytes["forward_in"] > 0  # rows were computed at other ranks
    for rank, sinks in enumerate(all_sinks):
        right = eager_attention(batch, torch.float64, 0.0, sinks)
        for name, a, b in zip(NAMES, ours[rank], right, strict=False):
            torch.testing.assert_close(a.double(), rows_of_rank(batch, plan.layout, rank, b), rtol=1e-5, atol=1e-5)
            assert name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (({"softcap": 30.0}, {"softcap": 50.0}), ("softcap 30", "softcap 50")),
        (({"scale": 0.5}, {"scale": 0.25}), ("scale 0.5", "scale 0.25")),
    ],
    ids=["softcap", "scale"],
)
def test_ranks_that_differ_in_what_makes_scores_are_told_so(options: Any, said: Any) -> None:
    shape = distca.Heads(4, 2, 16)
    batch = random_batch((100, 30), shape, 6)
    plan = distca.plan(distca.Layout.from_documents([[100], [30]]), shape, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> Any:
        rows = [rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return distca.core_attention(*rows, plan.for_rank(rank), context=context, **options[rank])

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
    assert all(isinstance(result, distca.PlanMismatchError) for result in results), results
    told = " ".join(map(str, results))
    assert all(part in told for part in said), told
    assert "another plan" not in told, "a rank that is told of it blames the plan"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"softcap": -1.0}, "softcap = -1"),
        ({"softcap": float("nan")}, "softcap = nan"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"sinks": torch.zeros(4, 1)}, "sinks has shape"),
    ],
    ids=str,
)
def test_a_softcap_or_sinks_of_another_form_are_refused(options: Any, said: Any) -> None:
    shape = distca.Heads(4, 2, 16)
    batch = random_batch((30,), shape, 6)
    plan = distca.plan(distca.Layout.from_documents([[30]]), shape)
    with loopback_group(plan) as (context,), pytest.raises(distca.InvalidArgumentError, match=said):
        distca.core_attention(batch.q, batch.k, batch.v, plan, context=context, **options)
