"""A plan computes every pair once, and moves every row that a task needs, once and no other."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

import distca
from support.batches import examples
from support.plan_reader import heads_of, keys_of_rows, own_rows, read_slice
from support.random_plans import HEADS, Made, plans
from support.step_simulation import Simulation


@examples(400)
@given(plans())
def test_every_visible_pair_of_every_head_is_computed_exactly_once(made: Made) -> None:
    plan = made.plan
    computed: Counter[tuple[int, int, int]] = Counter()
    homes = {
        (document, row): rank
        for rank in range(plan.layout.num_ranks)
        for document, begin, end in plan.layout.segments(rank)
        for row in range(begin, end)
    }
    for task in plan.tasks:
        assert task.q_begin < task.q_end
        assert (task.kv_begin, task.kv_end) == keys_of_rows(plan, task.document, task.q_begin, task.q_end)
        assert 0 <= task.server < plan.layout.num_ranks
        for row in range(task.q_begin, task.q_end):
            computed.update((task.document, row, head) for head in range(task.kv_head_begin, task.kv_head_end))
            assert homes[(task.document, row)] == task.home
    heads = range(plan.heads.kv)
    assert computed == Counter(
        (d, row, head) for d, rows in enumerate(own_rows(plan.layout)) for row in rows for head in heads
    )
    of_slices = [
        (group.document, *t[1:5], *heads_of(group), t.home, rank, group.round)
        for rank in range(plan.layout.num_ranks)
        for tables in [read_slice(plan.for_rank(rank).tensor.tolist())]
        for t in tables.tasks
        for group in [tables.groups[t.group]]
    ]
    assert sorted(of_slices) == sorted(tuple(task) for task in plan.tasks)


@examples(250)
@given(plans())
def test_every_row_is_where_its_task_looks_for_it_and_every_result_comes_home_once(
    made: Made,
) -> None:
    plan = made.plan
    simulation = Simulation(plan)
    simulation.run()
    stats = plan.stats
    assert list(stats.bytes.values()) == simulation.bytes
    assert list(stats.bytes) == ["forward_in", "forward_out", "backward_in", "backward_out"]
    listed = Counter(
        (list(stats.bytes).index(t.message), t.source, t.target, t.tensor, t.document, row, head)
        for t in plan.transfers
        for row in range(t.begin, t.end)
        for head in range(t.kv_head_begin, t.kv_head_end)
    )
    assert listed == simulation.moved
    assert {name: sum(t.bytes for t in plan.transfers if t.message == name) for name in stats.bytes} == stats.bytes
    node = made.ranks_per_node or plan.layout.num_ranks
    far = [t for t in plan.transfers if t.source // node != t.target // node]
    assert stats.bytes_between_nodes == {name: sum(t.bytes for t in far if t.message == name) for name in stats.bytes}
    for phase, name in enumerate(("forward", "backward")):
        ends, sizes = simulation.arena_ends[phase], [arena.total for arena in stats.arena_bytes[name]]
        headers = [tables.header for tables in simulation.slices]
        assert sizes == [(h.forward_arena_bytes, h.backward_arena_bytes)[phase] for h in headers]
        # All bytes of an arena are used, up to the alignment of the last extent and the rest of a last key block.
        assert all(end <= size for end, size in zip(ends, sizes, strict=True))
        assert all((end == 0) == (size == 0) for end, size in zip(ends, sizes, strict=True))
        assert all(h.slot_bytes == stats.slot_bytes for h in headers)
    assert stats.slot_bytes == max(arena.total for arenas in stats.arena_bytes.values() for arena in arenas)


def test_statistics_of_a_plan_that_can_be_counted_by_hand() -> None:
    """Documents of 3 and 1 rows; rank 1 fetches rows 0 and 1 as keys for row 2, which it holds."""
    heads = distca.Heads(2, 1, 8, 16)
    plan = distca.plan(distca.Layout([[(0, 0, 2)], [(0, 2, 3), (1, 0, 1)]]), heads, balance=False)
    stats = plan.stats
    assert stats.load_before == stats.load == [2 * (1 + 2), 2 * (3 + 1)]
    assert stats.imbalance_after == pytest.approx(8 / 7)
    assert stats.lower_bound == 2 * 4
    keys = 2 * 1 * (8 + 16) * 4
    # Both ranks add to dk, dv of rows 0 and 1, so they come home in fp32.
    assert stats.bytes == {"forward_in": keys, "forward_out": 0, "backward_in": keys, "backward_out": keys}


def test_loads_are_compared_with_what_ranks_of_their_speed_should_have() -> None:
    """Documents of 30 and 60 rows have 465 and 1830 pairs; a rank four times as fast is to have four fifths of them."""
    layout = distca.Layout.from_documents([[30], [60]])
    stats = distca.plan(layout, distca.Heads(1, 1, 8), balance=False, speeds=[1, 4]).stats
    assert stats.speeds == [1, 4]
    assert stats.imbalance_before == stats.imbalance_after == pytest.approx(465 / 459)
    assert stats.largest_before == stats.largest == pytest.approx(465 * 2.5)
    assert stats.gap == pytest.approx(465 * 2.5 / 1147 - 1)  # no plan is below the mean, 1147.5
    plain = distca.plan(layout, distca.Heads(1, 1, 8), balance=False).stats
    assert (plain.speeds, plain.largest, plain.imbalance_after) == ([1, 1], 1830, pytest.approx(1830 / 1147.5))


def test_only_the_speeds_of_servers_count_as_planned() -> None:
    """Documents of 10, 20 and 30 rows have 55, 210 and 465 pairs. Rank 0 is the fastest and does not serve."""
    layout = distca.Layout.from_documents([[10], [20], [30]])
    tasks = [(0, 0, 10, 0, 1, 1), (1, 0, 20, 0, 1, 2), (2, 0, 30, 0, 1, 2)]
    stats = distca.plan(layout, distca.Heads(1, 1, 8), servers=[1, 2], speeds=[3, 1, 2], tasks=tasks).stats
    assert stats.load == [0, 55, 675]
    assert stats.imbalance_after == pytest.approx((675 / 2) / (730 / 3))
    assert stats.imbalance_before == pytest.approx((465 / 2) / (730 / 6))
    assert (stats.largest_before, stats.largest) == (pytest.approx(465 / 2 * 1.5), pytest.approx(675 / 2 * 1.5))


def test_a_head_range_moves_its_own_bytes_and_no_more() -> None:
    """The other rank computes one of a document's two key/value heads."""
    heads = distca.Heads(4, 2, 8, 16)
    plan = distca.plan(distca.Layout([[(0, 0, 10)], []]), heads, tasks=[(0, 0, 10, 0, 1, 0), (0, 0, 10, 1, 2, 1)])
    q, k, v, out, lse = 2 * 8 * 4, 8 * 4, 16 * 4, 2 * 16 * 4, 2 * 4
    assert plan.stats.load == [2 * 55, 2 * 55]
    assert plan.stats.bytes == {
        "forward_in": 10 * (q + k + v),
        "forward_out": 10 * (out + lse),
        "backward_in": 10 * (q + k + v + out + 2 * lse),
        # One server contributes to each head's keys, so their gradients come home in the input's dtype.
        "backward_out": 10 * (q + k + v),
    }


def test_a_window_moves_only_the_keys_that_it_sees() -> None:
    """Rank 1 has the last 256 of 1024 rows. Without balance it fetches the keys in the window of its first row and no
    others.
    """
    heads = distca.Heads(2, 1, 8)
    layout = distca.Layout([[(0, 0, 768)], [(0, 768, 1024)]])
    for window, fetched in ((1, 0), (2, 1), (100, 99), (None, 768)):
        plan = distca.plan(layout, heads, window=window, balance=False)
        assert plan.stats.bytes["forward_in"] == fetched * (8 + 8) * 4


def test_an_empty_layout_has_a_plan_that_does_nothing() -> None:
    plan = distca.plan(distca.Layout([[], [(-1, 0, 3)], []]), HEADS[0])
    assert plan.tasks == []
    assert plan.stats.load == plan.stats.load_before == [0, 0, 0]
    assert plan.stats.imbalance_before == plan.stats.imbalance_after == 1.0
    Simulation(plan).run()


@examples(200)
@given(plans())
def test_a_rank_sends_to_the_rank_after_it_first_so_that_not_all_send_to_one(made: Made) -> None:
    ranks = made.plan.layout.num_ranks
    for rank in range(ranks):
        tables = read_slice(made.plan.for_rank(rank).tensor.tolist())
        for sends in tables.sends:
            turns = [
                (send.direction, send.round, 0 if send.round else send.after, (send.peer - rank) % ranks)
                for send in sends
            ]
            assert turns == sorted(turns)


def test_where_every_rank_sends_to_all_no_two_begin_with_the_same() -> None:
    plan = distca.plan(distca.Layout.head_tail([8192], ranks=8), HEADS[0], balance=False)
    sends = [read_slice(plan.for_rank(rank).tensor.tolist()).sends[0] for rank in range(8)]
    peers = [list(dict.fromkeys(send.peer for send in of if send.peer != rank)) for rank, of in enumerate(sends)]
    assert all(len(of_rank) == 7 for of_rank in peers)
    for turn in range(7):
        assert len({of_rank[turn] for of_rank in peers}) == 8
