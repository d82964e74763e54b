"""The loads of a plan's servers: what they are, and how well they are balanced."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from support.batches import LENGTHS, examples, scattered, spill
from support.plan_reader import keys_of_rows, own_rows
from support.random_plans import COSTS, HEADS, Made, layouts, plans


def _rows_cost(cost: distca.CostModel, begin: int, end: int) -> int:
    """The cost of rows [begin, end) of a causal document, where row i sees keys 0 .. i."""
    return sum(cost.per_pair * (row + 1) + cost.per_row for row in range(begin, end))


def _rate(cost: distca.CostModel, num_rows: int, num_keys: int) -> int:
    """The rate in 1024ths, on straight lines between powers of two computed in 1024ths, with the last value beyond."""
    if not cost.rates:
        return 1024

    def between(line: Callable[[int], int], n: int, count: int) -> int:
        octave = min(n.bit_length() - 1, count - 1)
        if octave == count - 1:
            return line(octave)
        rise = (line(octave + 1) - line(octave)) * (n * 1024 // 2**octave - 1024)
        return line(octave) + (abs(rise) // 1024 if rise > 0 else -(abs(rise) // 1024))

    lines = cost.rates
    return between(lambda i: between(lambda j: lines[i][j], num_keys, len(lines[0])), num_rows, len(lines))


def _cost(plan: distca.Plan, cost: distca.CostModel, document: int, begin: int, end: int) -> int:
    pairs = 0
    for row in range(begin, end):
        first, last = keys_of_rows(plan, document, row, row + 1)
        pairs += last - first
    first, last = keys_of_rows(plan, document, begin, end)
    return -(-cost.per_pair * pairs * _rate(cost, end - begin, last - first) // 1024) + cost.per_row * (end - begin)


def _loads_at_home(plan: distca.Plan, cost: distca.CostModel) -> list[int]:
    loads = []
    for rank in range(plan.layout.num_ranks):
        tasks: list[tuple[int, int, int]] = []
        for d, begin, end in plan.layout.segments(rank):
            if tasks and tasks[-1][0] == d and tasks[-1][2] == begin:  # adjoining segments of a document are one task
                begin = tasks.pop()[1]
            tasks.append((d, begin, end))
        loads.append(plan.heads.q * sum(_cost(plan, cost, *task) for task in tasks if task[0] >= 0))
    return loads


@examples(400)
@given(plans())
def test_loads_are_what_the_tasks_cost(made: Made) -> None:
    plan, cost, servers, _ = made
    stats, ranks = plan.stats, plan.layout.num_ranks
    load = [0] * ranks
    for task in plan.tasks:
        heads = (task.kv_head_end - task.kv_head_begin) * plan.heads.q // plan.heads.kv
        load[task.server] += heads * _cost(plan, cost, task.document, task.q_begin, task.q_end)
    assert stats.load == load
    assert stats.load_before == _loads_at_home(plan, cost)
    total = sum(load)
    assert {task.server for task in plan.tasks} <= servers
    assert stats.num_servers == len(servers)
    assert stats.imbalance_before == pytest.approx(
        max(stats.load_before) * ranks / (sum(stats.load_before) or 1) if total else 1.0
    )
    assert stats.imbalance_after == pytest.approx(max(load) * len(servers) / total if total else 1.0)
    assert max(load) >= stats.lower_bound
    if cost.rates:
        return
    # Ranks may share the heads of a row, but not the query heads of one key/value head. Therefore no plan does better
    # than the costliest such group of heads, or than the mean rounded up to whole groups.
    rows = [
        max(_cost(plan, cost, d, row, row + 1) for row in rows_of_document)
        for d, rows_of_document in enumerate(own_rows(plan.layout))
    ]
    shared = plan.heads.q // plan.heads.kv
    mean = -(-(total // shared) // len(servers))
    assert stats.lower_bound == shared * max([mean, *rows])


@examples(300)
@given(
    layouts(),
    st.sampled_from((0.0, 0.01, 0.05, 0.3)),
    st.sampled_from((1, 10, 64, 500)),
    st.sampled_from(COSTS),
)
def test_the_largest_load_is_within_tolerance_or_no_end_row_of_a_task_can_move_with_gain(
    layout: distca.Layout, tolerance: float, min_rows: int, cost: distca.CostModel
) -> None:
    plan = distca.plan(layout, HEADS[0], tolerance=tolerance, min_rows=min_rows, cost=cost)
    load = [n // plan.heads.q for n in plan.stats.load]
    total, ranks = sum(load), layout.num_ranks
    largest = max(load)
    assert largest <= max(n // plan.heads.q for n in plan.stats.load_before)
    if largest * ranks * 1000 <= total * (1000 + round(1000 * tolerance)) or largest == -(-total // ranks):
        return
    heaviest = load.index(largest)
    for task in plan.tasks:
        if task.server != heaviest:
            continue
        for row in (task.q_begin, task.q_end - 1):
            moved = _cost(plan, cost, task.document, row, row + 1)
            for server in range(ranks):
                if load[server] * ranks < total - ranks:  # the server is below the mean by more than rounding
                    assert load[server] + moved >= largest, f"row {row} of {task} could go to rank {server}: {load}"


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("whole_documents", [True, False])
def test_heavy_tailed_documents_are_balanced_to_the_tolerance(
    ranks: int, tolerance: float, whole_documents: bool
) -> None:
    rng = random.Random(ranks)
    lengths = sorted((max(1, int(rng.lognormvariate(5.0, 1.5))) for _ in range(12 * ranks)), reverse=True)
    of_ranks = [lengths[12 * rank : 12 * (rank + 1)] for rank in range(ranks)]
    layout = distca.Layout.from_documents(of_ranks) if whole_documents else spill(lengths, ranks)
    plan = distca.plan(layout, HEADS[0], tolerance=tolerance)
    load = [0] * ranks
    for task in plan.tasks:
        load[task.server] += _rows_cost(distca.CostModel(), task.q_begin, task.q_end)
    mean = sum(load) / ranks
    assert max(plan.stats.load_before) > 1.5 * mean * plan.heads.q, "this layout needs no planner"
    # Without tolerance, balance is limited by the cost of single rows.
    assert max(load) <= (1 + tolerance) * mean + (max(lengths) if tolerance == 0.0 else 0)


def test_balance_off_leaves_every_row_at_home() -> None:
    for layout in (spill(LENGTHS, 3), scattered(LENGTHS, 5, 1)):
        plan = distca.plan(layout, HEADS[0], balance=False)
        assert all(task.server == task.home for task in plan.tasks)
        assert plan.stats.load == plan.stats.load_before
        assert plan.stats.imbalance_after == plan.stats.imbalance_before > 1.0


def test_a_balanced_layout_of_whole_documents_moves_nothing() -> None:
    plan = distca.plan(distca.Layout.from_documents([[100, 20], [20, 100]]), HEADS[0])
    assert sum(plan.stats.bytes.values()) == 0
    assert plan.stats.slot_bytes == 0
    assert [(t.document, t.q_begin, t.q_end, t.home, t.server) for t in plan.tasks] == [
        (0, 0, 100, 0, 0), (1, 0, 20, 0, 0), (2, 0, 20, 1, 1), (3, 0, 100, 1, 1)
    ]  # fmt: skip


def test_no_piece_is_cut_smaller_than_min_rows_where_the_tolerance_allows() -> None:
    layout = distca.Layout.from_documents([[4096], [300], [300], []])
    for min_rows in (1, 64, 200):
        plan = distca.plan(layout, HEADS[0], tolerance=0.1, min_rows=min_rows)
        assert plan.stats.imbalance_after <= 1.1
        assert min(task.q_end - task.q_begin for task in plan.tasks) >= min_rows


def test_dedicated_servers_get_equal_loads_and_the_others_nothing() -> None:
    lengths = (4096, 300, 300, 1, 77)
    for layout in (distca.Layout.from_documents([lengths, [], []]), spill(lengths, 3)):
        plan = distca.plan(layout, HEADS[0], servers=[1, 2], tolerance=0.02)
        assert plan.stats.load[0] == 0
        assert max(plan.stats.load) <= 1.02 * sum(plan.stats.load) / 2


@pytest.mark.parametrize("split_heads", [True, False])
def test_bounds_of_a_given_schedule_hold_whatever_it_does_with_heads(split_heads: bool) -> None:
    layout, heads = distca.Layout.from_documents([[2], [7, 1]]), distca.Heads(3, 3, 8)
    tasks = [
        (task.document, task.q_begin, task.q_end, task.kv_head_begin, task.kv_head_end, task.server)
        for task in distca.plan(layout, heads, tolerance=0.3, min_rows=1).tasks
    ]
    stats = distca.plan(layout, heads, tolerance=0.3, tasks=tasks, split_heads=split_heads).stats
    assert stats.imbalance_after <= 1.3
    assert 0 < stats.bytes_lower_bound <= sum(stats.bytes.values())
    assert stats.lower_bound <= stats.largest
