"""Plans with labels: in backward other ranks may have other rows, and this rank must have the same."""

from __future__ import annotations

import pytest
import torch

import distca
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)
OWN = [10, 20, 10]


def _call(context: distca.Context, forward: list[list[int]], backward: list[list[int]], label: str) -> None:
    plans = [
        distca.plan(distca.Layout.from_documents(lengths), HEADS, context=context, balance=False, label=label)
        for lengths in (forward, backward)
    ]
    q, k, v = (torch.ones(sum(OWN), heads, 8) for heads in (2, 1, 1))
    if context.rank == 0:
        distca.core_attention(q, k, v, plans[0], plan_backward=plans[1], context=context)
    else:
        distca.core_attention(q[:5], k[:5], v[:5], plans[0], context=context)


@pytest.mark.parametrize("label", ["", "tick 3"])
def test_this_rank_must_have_the_same_rows(label: str) -> None:
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        _call(context, [OWN], [OWN], label)
        with pytest.raises(distca.InvalidArgumentError, match="than that of forward .segment 1 of this rank"):
            _call(context, [OWN], [[10, 10, 20]], label)


def _call_with_other_rows_of_the_other_rank(label: str) -> str:
    with distca.init(max_tokens=64, heads=HEADS, timeout=10) as context:
        try:
            _call(context, [OWN, [5]], [OWN, [2, 3]], label)
        except distca.DistcaError as error:
            return str(error)
    return ""


def test_another_rank_may_have_other_rows_where_plans_have_labels() -> None:
    assert launch(_call_with_other_rows_of_the_other_rank, "tick 3", ranks=2) == ["", ""]
    refused, *_ = launch(_call_with_other_rows_of_the_other_rank, "", ranks=2)
    assert "plan of backward is of another layout than that of forward (on other ranks)" in refused
