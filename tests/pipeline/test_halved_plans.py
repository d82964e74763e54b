"""Plans of an iteration whose micro-batches are dealt into halves: both halves are planned, and rows find their way."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import distca
from distca.pipeline import PipelinePlans

HEADS = distca.Heads(q=4, kv=2, dim=16)
STAGES = [[0, 1], [2, 3]]
LENGTHS = [[[600, 100, 300], [500, 500]], [[100] * 10, [990, 10]], [[400, 300, 300], [250] * 4]]
LAYOUTS = [distca.Layout.from_documents(lengths) for lengths in LENGTHS]
HALVES = [distca.halves(layout) for layout in LAYOUTS]
OTHER = distca.Layout.from_documents([[600, 101, 299], [500, 500]])  # with as many documents as the first


def _plans(**options: Any) -> PipelinePlans:
    options = {"stages": STAGES, "halves": HALVES, "tolerance": 0.02, "min_rows": 8} | options
    return PipelinePlans(LAYOUTS, HEADS, **options)


def test_each_half_of_a_tick_has_the_documents_of_that_half_of_its_micro_batches() -> None:
    plans = _plans()
    for number, tick in enumerate(plans.table):
        for half in range(2):
            layout = plans.plan(number, 0, half).layout
            for stage, work in enumerate(tick.work):
                for index, rank in enumerate(STAGES[stage]):
                    own = [] if work is None else HALVES[work.microbatch][half].layout.segments(index)
                    assert [segment[1:] for segment in layout.segments(rank)] == [segment[1:] for segment in own]
        both = sum(sum(plans.plan(number, 0, half).layout.document_lengths) for half in range(2))
        assert both == sum(sum(map(sum, LENGTHS[work.microbatch])) for work in tick.work if work is not None)


def test_plans_say_their_tick_and_half_and_are_taken_in_parts() -> None:
    plans = _plans(layers=2)
    assert plans.label(3, 1) == "tick 3 of 8, forward, second half"
    seen = set()
    for tick in range(len(plans.table)):
        for half in range(2):
            plan = plans.plan(tick, 1, half)
            assert plan.in_parts and plan.half == half
            seen.add(plan.digest)
    assert len(seen) == 2 * len(plans.table)


def test_a_function_makes_the_halves_of_each_micro_batch() -> None:
    plans = _plans(halves=distca.halves)
    assert plans.halves is not None
    assert [[half.documents for half in pair] for pair in plans.halves] == [[h.documents for h in p] for p in HALVES]
    assert plans.plan(3, 0, 1).digest == _plans().plan(3, 0, 1).digest


def test_the_longest_label_fits() -> None:
    """A plan has room for 48 characters."""
    label = _plans().label(0, 1).replace("tick 0 of 8, forward", "tick 999999 of 999999, backward")
    distca.plan(LAYOUTS[0], HEADS, label=label)


def test_statistics_are_those_of_both_halves() -> None:
    plans = _plans(layers=[1, 2])
    each = [[plans.plan(tick, step, half).stats for step in range(2) for half in range(2)] for tick in range(8)]
    for tick, of_tick in zip(plans.stats.ticks, each, strict=True):
        assert [stats.load for stats in tick.steps] == [stats.load for stats in of_tick]
        assert tick.largest == sum(max(stats.load) for stats in of_tick)
    assert plans.stats.slot_bytes == max(stats.slot_bytes for of_tick in each for stats in of_tick)
    assert plans.stats.imbalance_before > 1.5 and plans.stats.imbalance_after <= 1.03


def test_backward_ticks_have_the_loads_of_forward_ticks_mirrored_in_each_half() -> None:
    plans = _plans()
    for half in range(2):
        ticks: dict[str, list[list[int]]] = {"forward": [], "backward": []}
        for number, tick in enumerate(plans.table):
            ticks[tick.phase].append(plans.plan(number, 0, half).stats.load)
        for forward, backward in zip(ticks["forward"], ticks["backward"], strict=True):
            assert forward == backward[2:] + backward[:2]


def test_key_gradients_come_home_at_once_by_default() -> None:
    """As in ping-pong without a pipeline, where only the first of several rounds would overlap."""
    rows = [distca.plan(half.layout, HEADS, overlap=True, tolerance=0.02, min_rows=8) for half in HALVES[0]]
    first = PipelinePlans(LAYOUTS[:1], HEADS, stages=[[0, 1]], halves=HALVES[:1], tolerance=0.02, min_rows=8)
    assert [first.plan(0, 0, half).stats.slot_bytes for half in range(2)] == [plan.stats.slot_bytes for plan in rows]


def test_every_rank_makes_the_same_plans_which_can_be_pickled() -> None:
    plans = [_plans(rank=rank, layers=[2, 1]) for rank in range(4)]
    copies = [pickle.loads(pickle.dumps(of_rank)) for of_rank in plans]
    for tick in range(len(plans[0].table)):
        for half in range(2):
            assert len({of_rank.plan(tick, 1, half).digest for of_rank in plans + copies}) == 1


@pytest.mark.parametrize("rank", range(2))
def test_what_is_split_is_joined_again_and_gradients_find_their_rows(rank: int) -> None:
    plans = _plans(rank=rank)
    for microbatch in range(3):
        x = torch.randn(1000, 5, requires_grad=True)
        parts = plans.split(microbatch, x)
        assert sum(map(len, parts)) == 1000
        whole = plans.join(microbatch, parts)
        assert torch.equal(whole, x)
        weight = torch.randn(1000, 5)
        (whole * weight).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, weight)
    columns = plans.split(1, torch.arange(2000).reshape(2, 1000), dim=1)
    assert torch.equal(plans.join(1, columns, dim=1), torch.arange(2000).reshape(2, 1000))


def test_rows_of_padding_are_in_neither_half_and_idle_rows_in_no_whole() -> None:
    layout = distca.Layout([[(0, 0, 3), (-1, 0, 2), (1, 0, 2)], [(-1, 0, 4)]])
    both = distca.halves(layout, idle_rows=1)
    for rank, expected in ((0, [0, 1, 2, 0, 0, 5, 6]), (1, [0] * 4)):
        plans = PipelinePlans([layout], HEADS, stages=[[0, 1]], halves=[both], rank=rank)
        x = torch.arange(float(len(expected)), requires_grad=True)
        parts = plans.split(0, x, fill=7)
        assert [len(part) for part in parts] == ([3, 2] if rank == 0 else [1, 1])
        whole = plans.join(0, parts)
        assert whole.tolist() == expected
        whole.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [
            float(n > 0 or i == 0) * (rank == 0) for i, n in enumerate(expected)
        ]


def test_gradients_reach_a_half_without_rows() -> None:
    """Otherwise this rank would not make the calls of that half's backward, for which the others wait."""
    layout = distca.Layout.from_documents([[4], [3]])
    for rank in range(2):
        plans = PipelinePlans([layout], HEADS, stages=[[0, 1]], halves=[distca.halves(layout)], rank=rank)
        parts = [torch.ones(len(part), 2, requires_grad=True) for part in plans.split(0, torch.ones(4 - rank, 2))]
        assert 0 in map(len, parts)
        plans.join(0, parts).sum().backward()
        assert all(part.grad is not None for part in parts)


@pytest.mark.parametrize(
    ("halves", "message"),
    [
        (HALVES[:2], "halves of 2 micro-batches, there are 3"),
        ([*HALVES[1:], HALVES[0]], "the halves of micro-batch 0 are not those of its layout"),
        ([distca.halves(OTHER), *HALVES[1:]], "the halves of micro-batch 0 are not those of its layout"),
        ([(one, one) for one, _ in HALVES], "the halves of micro-batch 0 are not those of its layout"),
        (True, "halves is True; a pair of halves for each micro-batch"),
        ([HALVES[0], HALVES[1], HALVES[2][:1]], "halves of micro-batch 2 are"),
        ([LAYOUTS[:2]] * 3, "halves of micro-batch 0 are"),
    ],
)
def test_halves_of_other_micro_batches_are_refused(halves: Any, message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _plans(halves=halves)


def test_a_half_is_asked_of_plans_with_halves_only() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="half = None; 0 or 1 with halves"):
        _plans().plan(0, 0)
    with pytest.raises(distca.InvalidArgumentError, match="half = 0; 0 or 1 with halves, None without"):
        _plans(halves=None).plan(0, 0, 0)
    with pytest.raises(distca.InvalidArgumentError, match="there are no halves; make the plans with halves="):
        _plans(halves=None).split(0, torch.zeros(1000))
