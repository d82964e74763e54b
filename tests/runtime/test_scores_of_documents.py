"""Documents of one plan may have masks, windows, scales and softcaps of their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import distca
from distca import Scores
from support.batches import Batch, random_batch, random_tasks, rows_of_rank, scattered
from support.groups import loopback_group, on_all_ranks, outcomes, together
from support.oracle import NAMES, visible

LENGTHS = (90, 200, 33, 150, 1)
HEADS = distca.Heads(4, 2, 16, 24)


def _exact(batch: Batch, scores: list[Scores]) -> tuple[torch.Tensor, ...]:
    """Each document by the textbook formula and PyTorch's autograd, in float64."""
    q, k, v = (t.double().clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
    outs, lses = [], []
    for (dq, dk, dv), (mask, window, scale, softcap) in zip(batch.documents(q, k, v), scores, strict=True):
        group = dq.shape[1] // dk.shape[1]
        dk, dv = (t.repeat_interleave(group, dim=1) for t in (dk, dv))
        s = torch.einsum("ihd,jhd->hij", dq, dk) * (dq.shape[2] ** -0.5 if scale is None else scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~visible(len(dq), mask, window), -math.inf)
        outs.append(torch.einsum("hij,jhd->ihd", s.softmax(2), dv))
        lses.append(s.logsumexp(2).T)
    out = torch.cat(outs)
    out.backward(batch.dout.double())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), torch.cat(lses).detach(), q.grad, k.grad, v.grad


def _step(batch: Batch, plan: distca.Plan, options: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The out, lse, dq, dk and dv in document order. Each rank calls with its own options."""

    def work(rank: int, context: distca.Context) -> Any:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, **options[rank])
        out.backward(rows_of_rank(batch, plan.layout, rank, batch.dout).nan_to_num())
        return out.detach(), lse, q.grad, k.grad, v.grad

    with loopback_group(plan) as contexts:
        return together(batch.lengths, plan.layout, on_all_ranks(contexts, work))


WINDOWS = [Scores(), Scores(window=64), Scores("full"), Scores("full", 40), Scores(window=17)]


@pytest.mark.parametrize("seed", [1, 2])
def test_documents_with_other_masks_and_windows_are_exact_wherever_they_are_computed(seed: int) -> None:
    batch, layout = random_batch(LENGTHS, HEADS, seed), scattered(LENGTHS, 3, seed)
    plans = [
        distca.plan(layout, HEADS, scores=WINDOWS, tolerance=0.0, min_rows=1),
        distca.plan(layout, HEADS, scores=WINDOWS, tasks=random_tasks(layout, HEADS.kv, seed)),
        distca.plan(layout, HEADS, scores=WINDOWS, balance=False),
    ]
    results = [_step(batch, plan, [{}] * 3) for plan in plans]
    for name, right, first, *others in zip(NAMES, _exact(batch, WINDOWS), *results, strict=True):
        torch.testing.assert_close(first.double(), right, rtol=1e-5, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")
        if name in ("out", "lse", "dq"):
            assert all(torch.equal(first, other) for other in others), name


def test_ranks_of_other_layers_share_a_step_with_scales_and_softcaps_of_their_own() -> None:
    lengths = (120, 40, 80)
    of_ranks = [{"scale": 0.1}, {"scale": -0.3, "softcap": 5.0}, {"scale": 0.25}]
    scores = [Scores(window=50, scale=0.1, softcap=0.0), Scores("full", None, -0.3, 5.0), Scores(scale=0.25, softcap=0)]
    batch = random_batch(lengths, HEADS, 4)
    plan = distca.plan(
        distca.Layout.from_documents([[120], [40], [80]]), HEADS, scores=scores, tolerance=0.0, min_rows=1
    )
    assert {(task.home, task.server) for task in plan.tasks if task.home != task.server}
    assert [(plan.for_rank(r).mask, plan.for_rank(r).window) for r in range(3)] == [s[:2] for s in scores]
    results = _step(batch, plan, of_ranks)
    for name, a, b in zip(NAMES, results, _exact(batch, scores), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"scale = 0.25; the plan says 0.1.* for document 0, of which this rank has rows"),
        ({"scale": 0.1, "softcap": 2.0}, "softcap = 2; the plan says 0 for document 0"),
    ],
)
def test_a_call_with_another_scale_than_the_plan_s_is_refused_on_all_ranks(options: dict[str, Any], said: str) -> None:
    batch = random_batch((60, 40), HEADS, 4)
    scores = [Scores(scale=0.1, softcap=0.0), Scores(scale=0.25, softcap=0.0)]
    plan = distca.plan(distca.Layout.from_documents([[60], [40]]), HEADS, scores=scores, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> Any:
        rows = [rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return distca.core_attention(*rows, plan.for_rank(rank), context=context, **([options, {}][rank]))

    with loopback_group(plan, timeout=20.0) as contexts:
        mistaken, other = outcomes(contexts, work)
    with pytest.raises(distca.InvalidArgumentError, match=said):
        raise mistaken
    assert isinstance(other, distca.PeerLeftError) and "rank 0 refused" in str(other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scores": [Scores()]}, "scores of 1 documents; the layout has 2"),
        ({"scores": [Scores(), None]}, "a distca.Scores is expected"),
        ({"scores": [Scores(), Scores(window=0)]}, "window = 0"),
        ({"scores": [Scores(), Scores("full", -5)]}, "window = -5"),
        ({"scores": [Scores(), Scores("diagonal")]}, "mask = 'diagonal'"),
        ({"scores": [Scores(), Scores(scale=1.0)]}, "some documents have a scale"),
        ({"scores": [Scores(softcap=1.0), Scores()]}, "some documents have a softcap"),
        ({"scores": [Scores(softcap=-1.0), Scores()]}, "softcap = -1.0"),
        ({"scores": [Scores(scale=math.nan), Scores()]}, "scale = nan"),
        ({"scores": [Scores(scale=-1e39), Scores()]}, r"scale = -1e\+39"),
        ({"scores": [Scores(softcap=1e39), Scores()]}, r"softcap = 1e\+39"),
        ({"scores": [Scores(softcap=1e-50), Scores()]}, "softcap = 1e-50"),
        ({"scores": [Scores(scale=math.inf)] * 2}, "scale = inf; None or a finite float32 is allowed"),
        ({"scores": [Scores()] * 2, "window": 3}, "scores are given, and mask or window as well"),
        ({"scores": 3}, "one distca.Scores for each document"),
    ],
    ids=str,
)
def test_wrong_scores_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.plan(distca.Layout.from_documents([[60], [40]]), HEADS, **options)


def test_at_most_32_different_scores_share_a_plan() -> None:
    layout = distca.Layout.from_documents([[10] * 33])
    assert distca.plan(layout, HEADS, scores=[Scores(window=1 + i % 32) for i in range(33)]).num_rows == 330
    with pytest.raises(distca.InvalidArgumentError, match="33 different masks, windows, scales and softcaps"):
        distca.plan(layout, HEADS, scores=[Scores(window=1 + i) for i in range(33)])


def test_plans_of_other_scores_differ_and_say_so() -> None:
    layout = distca.Layout.from_documents([[60, 8], [40]])
    plans = [
        distca.plan(layout, HEADS, scores=[Scores(), Scores(window=w), Scores()], rank=rank)
        for rank, w in enumerate((5, 6))
    ]
    assert plans[0].digest != plans[1].digest
    batch = random_batch((60, 8, 40), HEADS, 4)

    def work(rank: int, context: distca.Context) -> Any:
        rows = [rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return distca.core_attention(*rows, plans[rank], context=context)

    with loopback_group(plans[0], timeout=20.0) as contexts:
        results = outcomes(contexts, work)
    assert all(isinstance(result, distca.PlanMismatchError) for result in results)
    assert any("other masks, windows, scales or softcaps of documents" in str(result) for result in results)
