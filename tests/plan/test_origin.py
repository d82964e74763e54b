"""PlanMismatchError says what two plans differ in, whatever argument of `distca.plan` it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import distca
from support.groups import loopback_group, outcomes
from support.ranks import launch

HEADS = distca.Heads(4, 2, 16)
LAYOUT = distca.Layout([[(0, 0, 400)], [(1, 0, 64), (2, 0, 30)], [(3, 0, 50)]])
RANKS = LAYOUT.num_ranks
AS_PLANNED = distca.plan(LAYOUT, HEADS, tolerance=0.01, min_rows=8)
OTHERS = "(other servers, speeds, ranks_per_node, round_bytes, retain_bytes or tasks)"
AT_HOME = [(d, 0, n, 0, 2, rank) for d, n, rank in ((0, 400, 0), (1, 64, 1), (2, 30, 1), (3, 50, 2))]

#: For each case: the arguments of another plan, and the message: a name, the plan's value and that of the usual plan,
#: or a sentence.
CASES: dict[str, tuple[dict[str, Any], tuple[str, str, str] | str]] = {
    "documents": (
        {"layout": distca.Layout([[(0, 0, 400)], [(1, 0, 94)], [(2, 0, 50)]])},
        ("", "3 documents of 544 tokens", "4 documents of 544 tokens"),
    ),
    "tokens": (
        {"layout": distca.Layout([[(0, 0, 400)], [(1, 0, 64), (2, 0, 30)], [(3, 0, 5)]])},
        ("", "4 documents of 499 tokens", "4 documents of 544 tokens"),
    ),
    "lengths": (
        {"layout": distca.Layout([[(0, 0, 400)], [(1, 0, 60), (2, 0, 34)], [(3, 0, 50)]])},
        "(documents of other lengths, on other ranks, or with other bidirectional rows or branches)",
    ),
    "bidirectional rows": (
        {"layout": LAYOUT.with_bidirectional({0: [(0, 7)]})},
        "(documents of other lengths, on other ranks, or with other bidirectional rows or branches)",
    ),
    "query heads": (
        {"heads": distca.Heads(8, 2, 16)},
        (
            "",
            "8 query heads and 2 key/value heads of dim 16 (values 16), float32",
            "4 query heads and 2 key/value heads of dim 16 (values 16), float32",
        ),
    ),
    "dtype and values": (
        {"heads": distca.Heads(4, 2, 16, 24, torch.bfloat16)},
        (
            "",
            "4 query heads and 2 key/value heads of dim 16 (values 24), bfloat16",
            "4 query heads and 2 key/value heads of dim 16 (values 16), float32",
        ),
    ),
    "mask": ({"mask": "full"}, ("", "the full mask", "the causal mask")),
    "mask and window": ({"mask": "full", "window": 7}, ("", "the full mask with a window of 7", "the causal mask")),
    "window": ({"window": 77}, ("", "the causal mask with a window of 77", "the causal mask")),
    "tolerance": ({"tolerance": 0.255}, ("tolerance ", "0.255", "0.01")),
    "whole tolerance": ({"tolerance": 1}, ("tolerance ", "1", "0.01")),
    "min_rows": ({"min_rows": 397}, ("min_rows ", "397", "8")),
    "capacity": (
        {"capacity": AS_PLANNED.stats.slot_bytes - 64},
        ("", f"a capacity of {AS_PLANNED.stats.slot_bytes - 64} bytes", "no capacity"),
    ),
    "balance": ({"balance": False}, ("balance ", "off", "on")),
    "split_heads": ({"split_heads": False}, ("split_heads ", "off", "on")),
    "objective": ({"objective": "forward", "tolerance": 0.3}, ("objective ", "forward", "all")),
    "overlap": ({"overlap": True}, ("overlap ", "on", "off")),
    "reduce_dtype": (
        {"heads": distca.Heads(4, 2, 16, dtype=torch.bfloat16), "reduce_dtype": torch.bfloat16},
        ("; reduce_dtype ", "bfloat16", "float32"),
    ),
    "ranks_per_node": ({"ranks_per_node": 2}, OTHERS),
    "servers": ({"servers": [0, 2]}, OTHERS),
    "speeds": ({"speeds": [1, 3, 2]}, OTHERS),
    "retain_bytes": ({"retain_bytes": 1 << 20}, OTHERS),
    "tasks": ({"tasks": AT_HOME}, OTHERS),
    "two things": ({"tolerance": 0.5, "window": 5}, ("tolerance ", "0.5", "0.01")),
}


def _plan(**changed: Any) -> distca.Plan:
    return distca.plan(**{"layout": LAYOUT, "heads": HEADS, "tolerance": 0.01, "min_rows": 8} | changed)


def _attend(plan: distca.Plan, context: distca.Context) -> None:
    heads, rows = plan.heads, plan.layout.num_rows(context.rank)
    q, k = (torch.randn(rows, n, heads.dim).to(heads.dtype) for n in (heads.q, heads.kv))
    v = torch.randn(rows, heads.kv, heads.value_dim).to(heads.dtype)
    distca.core_attention(q, k, v, plan.for_rank(context.rank), context=context)


def _pattern(said: tuple[str, str, str] | str) -> str:
    """A pattern of the message, whichever of two ranks has found the difference and told the others."""
    if isinstance(said, str):
        return re.escape(said)
    name, other, usual = (re.escape(text) for text in said)
    return f"{name}({other} on rank 1, {usual} on rank [02]|{usual} on rank [02], {other} on rank 1)"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told_what_differs(case: str, streams: bool) -> None:
    changed, said = CASES[case]
    plans = [AS_PLANNED, _plan(**changed), AS_PLANNED]
    with loopback_group(plans, timeout=20.0, streams=streams) as contexts:
        errors = outcomes(contexts, lambda rank, context: _attend(plans[rank], context))
    for error in errors:
        if error is None:
            continue  # this rank was done, or had queued everything, before its peers came: its next call would tell it
        assert isinstance(error, distca.PlanMismatchError), error
        assert re.search(_pattern(said), str(error)), str(error)
    assert any(errors)


def test_plans_made_in_different_ways_that_come_out_alike_go_together() -> None:
    plans = [_plan(tolerance=0.01), _plan(tolerance=0.010001), _plan(capacity=AS_PLANNED.stats.slot_bytes)]
    assert len({plan.digest for plan in plans}) == 1 and len({tuple(plan.tensor.tolist()) for plan in plans}) == 3
    with loopback_group(plans, timeout=20.0) as contexts:
        assert outcomes(contexts, lambda rank, context: _attend(plans[rank], context)) == [None] * RANKS


def test_of_many_plans_the_last_eight_are_told_apart() -> None:
    """A rank makes the last eight plans known. Nobody asks about older ones, because ranks stay together."""
    plans = [_plan(window=n) for n in range(1, 20)]
    assert len({plan.digest for plan in plans}) == len(plans)
    with loopback_group(plans, timeout=20.0) as contexts:

        def work(rank: int, context: distca.Context) -> None:
            for plan in plans[:-2]:
                _attend(plan, context)
            _attend(plans[-2 if rank == 1 else -1], context)

        # A rank that was done in time has no error.
        errors = [error for error in outcomes(contexts, work) if error is not None]
        assert errors
        for error in errors:
            assert isinstance(error, distca.PlanMismatchError), error
            assert re.search(
                _pattern(("", "the causal mask with a window of 18", "the causal mask with a window of 19")), str(error)
            )


def _with_a_cost_model_of_its_own(rank: int) -> str:
    cost = distca.CostModel(per_pair=1, per_row=1 + rank)
    with distca.init(max_tokens=400, heads=HEADS, cost=cost, timeout=20.0) as context:
        _attend(_plan(cost=cost), context)
        _attend(_plan(cost=cost), context)
    return "nothing"


def _outcome_with_a_cost_model_of_its_own() -> str:
    rank = torch.distributed.get_rank()
    try:
        return _with_a_cost_model_of_its_own(rank)
    except distca.PlanMismatchError as error:
        return str(error)


def test_ranks_whose_contexts_have_different_cost_models_are_told_so() -> None:
    for told in launch(_outcome_with_a_cost_model_of_its_own, ranks=RANKS):
        assert "(another cost model)" in told
