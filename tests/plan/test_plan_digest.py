"""The same arguments give the same plan on every rank, and its digest tells it from all others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from support.batches import examples, spill
from support.plan_reader import read_slice
from support.random_plans import HEADS, layouts


@examples(100)
@given(layouts(), st.sampled_from(HEADS), st.sampled_from((0.0, 0.05)), st.sampled_from((1, 64)))
def test_the_same_arguments_give_the_same_plan_to_the_last_bit(
    layout: distca.Layout, heads: distca.Heads, tolerance: float, min_rows: int
) -> None:
    again = distca.Layout([layout.segments(rank) for rank in range(layout.num_ranks)], branches=layout.branches)
    again = again.with_bidirectional(layout.bidirectional)
    first = distca.plan(layout, heads, tolerance=tolerance, min_rows=min_rows)
    second = distca.plan(again, heads, tolerance=tolerance, min_rows=min_rows, rank=layout.num_ranks - 1)
    assert first.digest == second.digest
    assert first.tasks == second.tasks
    for rank in range(layout.num_ranks):
        assert torch.equal(first.for_rank(rank).tensor, second.for_rank(rank).tensor)


def test_the_digest_changes_with_everything_that_changes_a_plan() -> None:
    def make(**changes: object) -> distca.Plan:
        arguments: dict[str, object] = {"layout": layout, "heads": heads, "tolerance": 0.05, "min_rows": 1}
        return distca.plan(**(arguments | changes))  # type: ignore[arg-type]

    layout, heads = spill((300, 5, 200), 3), distca.Heads(4, 2, 16)
    padded = distca.Layout([*(layout.segments(rank) for rank in (0, 1)), [*layout.segments(2), (distca.PADDING, 0, 1)]])
    variants = {
        "as it is": make(),
        "tolerance": make(tolerance=0.2),
        "min_rows": make(min_rows=50),
        "balance": make(balance=False),
        "cost per pair": make(cost=distca.CostModel(2, 0)),
        "cost per row": make(cost=distca.CostModel(1, 1)),
        "query heads": make(heads=distca.Heads(6, 2, 16)),
        "key heads": make(heads=distca.Heads(4, 1, 16)),
        "dim": make(heads=distca.Heads(4, 2, 24, 16)),
        "v_dim": make(heads=distca.Heads(4, 2, 16, 24)),
        "dtype": make(heads=distca.Heads(4, 2, 16, None, torch.bfloat16)),
        "another dtype": make(heads=distca.Heads(4, 2, 16, None, torch.float16)),
        "mask": make(mask="full"),
        "mask and window": make(mask="full", window=20),
        "window": make(window=100),
        "servers": make(servers=[0, 2]),
        "tasks": make(tasks=[(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 1), (2, 0, 200, 0, 2, 2)]),
        "heads of tasks": make(
            tasks=[(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 1), (2, 0, 200, 0, 1, 2), (2, 0, 200, 1, 2, 2)]
        ),
        "lengths": make(layout=spill((300, 6, 199), 3)),
        "a cut": make(layout=distca.Layout.packed((300, 5, 200), ranks=3, tokens_per_rank=170)),
        "padding": make(layout=padded),
        "rows that see each other": make(layout=layout.with_bidirectional({0: [(3, 9)]})),
        "others that do": make(layout=layout.with_bidirectional({0: [(3, 8)]})),
        "two ranges that touch": make(layout=layout.with_bidirectional({0: [(3, 6), (6, 9)]})),
        "those of another document": make(layout=layout.with_bidirectional({2: [(3, 9)]})),
        "ranks": make(layout=spill((300, 5, 200), 2)),
    }
    assert variants["tolerance"].tasks != variants["as it is"].tasks
    digests: dict[str, str] = {}
    for name, plan in variants.items():
        assert plan.digest not in digests, f"{name!r} and {digests[plan.digest]!r} have one digest"
        digests[plan.digest] = name
    assert make(tolerance=0.05).digest == variants["as it is"].digest


def test_a_plan_is_the_slice_of_the_rank_that_was_asked_for() -> None:
    layout = spill((300, 5), 3)
    plan = distca.plan(layout, HEADS[0], rank=2)
    assert plan.rank == 2
    assert read_slice(plan.tensor.tolist()).header.rank == 2
    assert read_slice(plan.for_rank(1).tensor.tolist()).header.rank == 1
    assert plan.tensor.dtype == torch.int64
    assert plan.num_rows == layout.num_rows(2)
    assert distca.plan(layout, HEADS[0]).rank == 0
