"""The plan of the backward pass must have forward's layout and mask on every rank, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import random_batch, rows_of_rank
from support.groups import loopback_group, outcomes

HEADS = distca.Heads(4, 2, 16)
LENGTHS = (100, 40, 60)
LAYOUT = distca.Layout([[(0, 0, 80)], [(0, 80, 100), (1, 0, 40), (2, 0, 20)], [(2, 20, 60)]])

#: Other layouts with as many rows on every rank.
OTHER_LAYOUTS: dict[str, distca.Layout] = {
    "other documents on rank 0": distca.Layout(
        [[(0, 0, 30), (1, 0, 50)], [(1, 50, 100), (2, 0, 30)], [(2, 30, 70)]],
    ),
    "the same documents, cut elsewhere": distca.Layout(
        [[(0, 20, 100)], [(0, 0, 20), (1, 0, 40), (2, 0, 20)], [(2, 20, 60)]],
    ),
    "another order on rank 1 alone": distca.Layout(
        [[(0, 0, 80)], [(1, 0, 40), (0, 80, 100), (2, 0, 20)], [(2, 20, 60)]],
    ),
    "other numbers of documents": distca.Layout(
        [[(1, 0, 80)], [(1, 80, 100), (0, 0, 40), (2, 0, 20)], [(2, 20, 60)]],
    ),
}


def _plan(layout: distca.Layout = LAYOUT, **options: Any) -> distca.Plan:
    return distca.plan(layout, HEADS, **({"min_rows": 1, "tolerance": 0.0} | options))


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return distca.core_attention(q, k, v, **options)


def _in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    step = distca.dispatch(q, k, v, **options)
    distca.attend(step)
    return distca.collect(step)


def _raw(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, plan: Any, plan_backward: Any, context: Any) -> Any:
    return torch.ops.distca.core_attention(q, k, v, plan.tensor, plan_backward.tensor, context=context.name)


def _refusals(attend: Callable[..., Any], plan: distca.Plan, backward: distca.Plan) -> list[str]:
    """What every rank says about this pair of plans before anything moves. The context still works afterwards."""
    batch = random_batch(LENGTHS, HEADS, 1)

    def run(rank: int, context: distca.Context) -> str:
        inputs = [rows_of_rank(batch, LAYOUT, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v)]
        with pytest.raises(RuntimeError) as caught:
            attend(*inputs, plan=plan.for_rank(rank), plan_backward=backward.for_rank(rank), context=context)
        assert context.step == 0
        out, _ = distca.core_attention(*inputs, plan.for_rank(rank), context=context)
        out.sum().backward()
        return str(caught.value)

    with loopback_group([plan, backward]) as contexts:
        results = outcomes(contexts, run)
    assert all(isinstance(said, str) for said in results), results
    return [str(said) for said in results]


@pytest.mark.parametrize("attend", [_whole, _in_parts, _raw], ids=["whole", "in parts", "operator"])
@pytest.mark.parametrize("other", OTHER_LAYOUTS)
def test_a_plan_of_another_layout_is_refused_on_every_rank(other: str, attend: Callable[..., Any]) -> None:
    layout = OTHER_LAYOUTS[other]
    assert [layout.num_rows(rank) for rank in range(3)] == [LAYOUT.num_rows(rank) for rank in range(3)]
    said = _refusals(attend, _plan(), _plan(layout))
    for rank, text in enumerate(said):
        assert "the plan of backward is of another layout than that of forward" in text
        same_here = layout.segments(rank) == LAYOUT.segments(rank)
        assert ("(on other ranks)" if same_here else "(segment 0 of this rank has rows") in text


@pytest.mark.parametrize(
    ("options", "backward", "names"),
    [
        (
            {},
            {"window": 16},
            "the plan of backward has the causal mask with a window of 16, that of forward the causal",
        ),
        ({"window": 16}, {"window": 17}, "a window of 17, that of forward the causal mask with a window of 16"),
        ({}, {"mask": "full"}, "the plan of backward has the full mask, that of forward the causal mask"),
    ],
    ids=["window", "another window", "full"],
)
def test_a_plan_of_another_mask_is_refused(options: Any, backward: Any, names: str) -> None:
    for text in _refusals(_whole, _plan(**options), _plan(**backward)):
        assert names in text


def test_a_retaining_plan_of_another_layout_is_refused_too() -> None:
    layout = OTHER_LAYOUTS["another order on rank 1 alone"]
    for text in _refusals(_whole, _plan(retain_bytes=2**20), _plan(layout)):
        assert "another layout" in text
