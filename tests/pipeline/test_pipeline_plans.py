"""The plans of an iteration: the same on every rank, balanced over all stages, mirrored where that is right."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import distca
from distca.pipeline import PipelinePlans

HEADS = distca.Heads(q=4, kv=2, dim=16)
STAGES = [[0, 1], [2, 3]]
LENGTHS = [[[900, 100], [500, 500]], [[100] * 10, [990, 10]], [[1000], [250] * 4], [[600, 400], [20] * 50]]
LAYOUTS = [distca.Layout.from_documents(lengths) for lengths in LENGTHS]


def _plans(**options: Any) -> PipelinePlans:
    return PipelinePlans(LAYOUTS, HEADS, **({"stages": STAGES, "tolerance": 0.02, "min_rows": 8} | options))


def test_a_tick_has_the_rows_of_the_micro_batches_that_its_stages_work_on() -> None:
    plans = _plans()
    for number, tick in enumerate(plans.table):
        layout = plans.plan(number, 0).layout
        for stage, work in enumerate(tick.work):
            for index, rank in enumerate(STAGES[stage]):
                expected = [] if work is None else LENGTHS[work.microbatch][index]
                assert [end for _, begin, end in layout.segments(rank)] == expected
                assert all(begin == 0 for _, begin, _ in layout.segments(rank))
        assert len(layout.document_lengths) == sum(
            len(LENGTHS[work.microbatch][index]) for work in tick.work if work is not None for index in range(2)
        )


def test_idle_stages_compute_as_much_as_busy_ones() -> None:
    stats = _plans().stats
    for tick in stats.ticks:
        for step in tick.steps:
            assert step.imbalance_after <= 1.02
            assert min(step.load) > 0
    assert stats.imbalance_before > 1.5 and stats.imbalance_after <= 1.02
    largest = [sum(max(step.load) for step in tick.steps) for tick in stats.ticks]
    assert [tick.largest for tick in stats.ticks] == largest


def test_inside_stages_each_computes_its_own_rows_as_if_it_were_alone() -> None:
    plans = _plans(across_stages=False, windows=[300, None], layers=1)
    for number, tick in enumerate(plans.table):
        made = plans.plan(number, 0)
        assert all((task.server < 2) == (task.home < 2) for task in made.tasks)
        for stage, work in enumerate(tick.work):
            loads = made.stats.load[2 * stage : 2 * stage + 2]
            if work is None:
                assert loads == [0, 0]
                continue
            window = [300, None][stage]
            alone = distca.plan(LAYOUTS[work.microbatch], HEADS, window=window, tolerance=0.02, min_rows=8)
            assert loads == alone.stats.load
    assert plans.stats.imbalance_after > 1.2 > _plans(windows=[300, None], layers=1).stats.imbalance_after


def test_backward_ticks_have_the_loads_of_forward_ticks_mirrored() -> None:
    plans = _plans()
    ticks: dict[str, list[list[int]]] = {"forward": [], "backward": []}
    for number, tick in enumerate(plans.table):
        ticks[tick.phase].append(plans.plan(number, 0).stats.load)
    for forward, backward in zip(ticks["forward"], ticks["backward"], strict=True):
        assert forward == backward[2:] + backward[:2]


@pytest.mark.parametrize(
    "options", [{"speeds": [1, 2, 3, 4]}, {"servers": [0, 1, 2]}, {"ranks_per_node": 3}], ids=lambda o: next(iter(o))
)
def test_ranks_that_differ_are_not_mirrored(options: dict[str, Any]) -> None:
    """With a mirrored schedule a slow rank would get the load of a fast one."""
    plans = _plans(**options)
    for number in range(len(plans.table)):
        stats = plans.plan(number, 0).stats
        speeds = options.get("speeds", [1] * 4)
        serves = [rank in options.get("servers", range(4)) for rank in range(4)]
        share = sum(stats.load) / sum(speed for speed, one in zip(speeds, serves, strict=True) if one)
        for load, speed, one in zip(stats.load, speeds, serves, strict=True):
            assert load <= 1.02 * share * speed if one else load == 0
    assert 1.0 <= plans.stats.imbalance_after <= 1.02


def test_every_rank_makes_the_same_plans() -> None:
    plans = [_plans(rank=rank, chunks=2, layers=[2, 1]) for rank in range(4)]
    for tick in range(len(plans[0].table)):
        for step in range(2):
            digests = {of_rank.plan(tick, step).digest for of_rank in plans}
            assert len(digests) == 1
            assert [of_rank.plan(tick, step).rank for of_rank in plans] == [0, 1, 2, 3]


def test_no_two_ticks_have_one_digest_even_with_the_same_rows() -> None:
    """With two chunks a stage works on the same micro-batches in several ticks."""
    plans = _plans(chunks=2)
    digests = [plans.plan(tick, 0).digest for tick in range(len(plans.table))]
    assert len(set(digests)) == len(digests)


def test_later_steps_leave_out_stages_with_fewer_layers() -> None:
    plans = _plans(layers=[1, 2])
    assert plans.depth == 2
    for number, tick in enumerate(plans.table):
        layout = plans.plan(number, 1).layout
        assert not any(layout.num_rows(rank) for rank in STAGES[0])
        assert [layout.num_rows(rank) > 0 for rank in STAGES[1]] == [tick.work[1] is not None] * 2


def test_windows_are_those_of_the_layers_of_the_model() -> None:
    plans = _plans(layers=3, windows=[None, 64, None] * 2)
    for tick in range(len(plans.table)):
        assert [plans.plan(tick, step).window for step in range(3)] == [None, 64, None]
        assert plans.plan(tick, 0) is plans.plan(tick, 2)


def test_stages_have_the_windows_of_their_own_layers_in_one_step() -> None:
    plans = _plans(layers=[1, 2], chunks=2, windows=[None, 8, 16, 4, None, 32])
    of_layers = [[[None], [8, 16]], [[4], [None, 32]]]
    seen = set()
    for number, tick in enumerate(plans.table):
        for stage, ranks in enumerate(STAGES):
            if (work := tick.work[stage]) is None:
                continue
            for step, window in enumerate(of_layers[work.chunk][stage]):
                mine = plans.plan(number, step).for_rank(ranks[0])
                assert mine.window == window, (number, stage, step)
                seen.add((stage, work.chunk, step))
    assert len(seen) == 6


def test_plans_that_were_made_for_a_context_can_be_pickled() -> None:
    with distca.loopback(4, max_tokens=2048, heads=HEADS)[0] as context:
        plans = _plans(layers=2, context=context)
    copy = pickle.loads(pickle.dumps(plans))
    assert [copy.plan(t, 0).digest for t in range(len(plans.table))] == [
        plans.plan(t, 0).digest for t in range(len(plans.table))
    ]
    assert str(copy.table) == str(plans.table)
    assert copy.stats.bytes == plans.stats.bytes and "stats" not in plans.__getstate__()
    assert copy.stats is copy.stats


def test_evaluation_has_the_plans_of_the_forward_ticks() -> None:
    assert [tick.phase for tick in _plans(backward=False).stats.ticks] == ["forward"] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": [[0, 1], [1, 2]]}, "each rank from 0 on once"),
        ({"stages": [["a"], [0]]}, "each rank from 0 on once"),
        ({"stages": [[0, 1, 2], [3]]}, "as many in every stage"),
        ({"stages": [[0], [1]]}, "micro-batch 0 is of 2 ranks, a stage has 1"),
        ({"stages": []}, "no stages"),
        ({"layers": [1]}, "one for each of 2 stages"),
        ({"layers": 0}, "layers = 0"),
        ({"windows": [None]}, "windows of 1 layers; the stages have 2 layers"),
        ({"windows": [None] * 2, "scores": [distca.Scores()] * 2}, "windows are given, and scores as well"),
        ({"scores": [distca.Scores(), 4]}, "scores of a layer"),
        ({"mask": "full"}, "mask = 'full' cannot be given"),
        ({"rank": 4}, "rank = 4; 0 to 3"),
        ({"retain_bytes": 10}, "retain_bytes = 10 cannot be given"),
        ({"label": "mine"}, "label = 'mine' cannot be given"),
        ({"chunks": 3}, "4 micro-batches with 3 chunks|multiple"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    if "chunks" in options:
        options = options | {"stages": [[0, 1], [2, 3], [4, 5]]}
    with pytest.raises(distca.InvalidArgumentError, match=message):
        _plans(**options)


@pytest.mark.parametrize("name", ["speeds", "servers", "ranks_per_node"])
def test_balance_inside_stages_has_no_options_of_single_ranks(name: str) -> None:
    options: dict[str, Any] = {"speeds": [1, 2, 1, 2], "servers": [0, 2], "ranks_per_node": 2}
    with pytest.raises(distca.InvalidArgumentError, match=f"{name} = .* cannot be given with across_stages=False"):
        _plans(across_stages=False, **{name: options[name]})


def test_there_must_be_a_micro_batch() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="there is no micro-batch"):
        PipelinePlans([], HEADS, stages=STAGES)
