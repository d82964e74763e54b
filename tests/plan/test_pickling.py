"""Layouts, heads, cost models and plans are values: they are copied and pickled, as DataLoader's workers and
checkpoints do.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import distca
from support.batches import random_batch, spill
from support.groups import loopback_group, on_all_ranks, run_step

HEADS = distca.Heads(4, 2, 16, 24)
LENGTHS = (300, 41, 64, 90)
LAYOUT = spill(LENGTHS, 3)
COST = distca.CostModel(per_pair=3, per_row=5, rates=((1024, 900), (800, 700)), unit_ns=0.5)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tolerance": 0.0, "min_rows": 1, "cost": COST, "window": 50, "speeds": [1, 2, 3]},
    {"retain_bytes": [1 << 20, 0, 1 << 20], "tolerance": 0.0, "min_rows": 1, "overlap": True},
    {"servers": [0, 2], "mask": "full", "split_heads": False, "ranks_per_node": 2, "objective": "forward"},
    {"tasks": [(d, 0, n, 0, 2, d % 3) for d, n in enumerate(LENGTHS)]},
]
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
by_ways = pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle"])


def _segments(layout: distca.Layout) -> list[list[tuple[int, int, int]]]:
    return [layout.segments(rank) for rank in range(layout.num_ranks)]


@by_ways
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "default")
def test_a_copy_of_a_plan_is_the_plan(options: dict[str, Any], way: Callable[[Any], Any]) -> None:
    plan = distca.plan(LAYOUT, HEADS, rank=1, **options)
    tasks, transfers, stats = plan.tasks, plan.transfers, plan.stats  # a plan keeps these once they were asked for
    other = way(plan)
    assert torch.equal(other.tensor, plan.tensor)
    for name in ("digest", "rank", "num_rows", "mask", "window", "heads", "retain_bytes", "retained_bytes", "in_parts"):
        assert getattr(other, name) == getattr(plan, name), name
    assert (other.tasks, other.transfers) == (tasks, transfers)
    for name in ("load", "load_before", "bytes", "arena_bytes", "retained_bytes", "binding", "bytes_lower_bound"):
        assert getattr(other.stats, name) == getattr(way(stats), name) == getattr(stats, name), name
    for rank in range(3):
        assert torch.equal(other.for_rank(rank).tensor, plan.for_rank(rank).tensor)
    assert _segments(other.layout) == _segments(LAYOUT)
    assert way(plan.for_parts()).in_parts


@by_ways
def test_a_copy_of_a_layout_is_the_layout(way: Callable[[Any], Any]) -> None:
    for layout in (LAYOUT, distca.Layout([[(0, 0, 7), (-1, 0, 3)], []])):
        assert _segments(way(layout)) == _segments(layout)
        assert way(layout).longest_document == layout.longest_document
    for half in distca.halves(LAYOUT):
        assert way(half.layout).longest_document == half.layout.longest_document == max(LENGTHS)


@by_ways
def test_copies_of_heads_and_of_a_cost_model_are_equal(way: Callable[[Any], Any]) -> None:
    assert COST.core is COST.core  # the model keeps this once it was asked for
    assert (way(HEADS), way(COST), way(COST).unit_ns) == (HEADS, COST, 0.5)


def test_steps_with_pickled_plans_have_the_bits_of_steps_with_the_plans() -> None:
    plans = [distca.plan(LAYOUT, HEADS, rank=rank, tolerance=0.0, min_rows=1) for rank in range(3)]
    batch = random_batch(LENGTHS, HEADS, 3)

    def run(plan_of: Callable[[int], distca.Plan]) -> list[tuple[torch.Tensor, ...]]:
        with loopback_group(plans) as contexts:
            return on_all_ranks(contexts, lambda rank, context: run_step(batch, plan_of(rank), context))

    pickled = [pickle.dumps(plan) for plan in plans]
    for mine, theirs in zip(run(lambda rank: pickle.loads(pickled[rank])), run(plans.__getitem__), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class _Planned(Dataset[distca.Plan]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> distca.Plan:
        if number >= len(self):
            raise IndexError(number)
        return distca.plan(distca.Layout.packed([90 + number], ranks=2, tokens_per_rank=64), HEADS, rank=1)


def test_workers_of_a_loader_may_make_plans() -> None:
    loader = DataLoader(_Planned(), batch_size=None, num_workers=1)
    assert [plan.digest for plan in loader] == [plan.digest for plan in _Planned()]


def test_a_plan_is_freed_once_nobody_has_it() -> None:
    """No garbage collection is needed for it, because the tables of hundreds of ranks are megabytes."""
    plan = distca.plan(LAYOUT, HEADS)
    assert plan.stats.load and plan.tasks
    gone = weakref.ref(plan._core)
    del plan
    assert gone() is None


@pytest.mark.parametrize("options", OPTIONS)
def test_a_checkpoint_with_plans_is_read_where_their_types_are_allowed(options: dict[str, Any]) -> None:
    types = [distca.Plan, distca.Plans, distca.Layout, distca.Heads, distca.CostModel, distca.Chunk]
    plan = distca.plan(LAYOUT, HEADS, **options)
    plans = distca.plans(LAYOUT, HEADS, windows=[None, 50, distca.Chunk(64)])
    file = io.BytesIO()
    torch.save({"plan": plan, "plans": plans}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="not an allowed global"):
        torch.load(file)
    file.seek(0)
    with torch.serialization.safe_globals(types):
        read = torch.load(file)
    assert read["plan"].tasks == plan.tasks
    assert {window: one.digest for window, one in read["plans"].items()} == {
        window: one.digest for window, one in plans.items()
    }


def test_a_pickled_plan_that_was_altered_is_refused() -> None:
    state = distca.plan(LAYOUT, HEADS, rank=1).__getstate__()
    altered = bytearray(state["_words"])
    altered[80] ^= 1
    with pytest.raises(distca.PlanFormatError):
        distca.Plan.__new__(distca.Plan).__setstate__(state | {"_words": altered})
    other = pickle.loads(pickle.dumps(distca.plan(LAYOUT, HEADS)))
    other._digest = 7
    with pytest.raises(distca.InvalidArgumentError, match="pickled with digest 0x0000000000000007, and its arguments"):
        other.for_rank(0)
