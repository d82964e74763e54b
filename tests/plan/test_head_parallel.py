"""Ranks that hold a document together exchange its rows for heads where that moves fewer bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.planner.memory import default_heap_bytes
from support.batches import examples
from support.random_plans import layouts

NODE_FACTOR = 9  # a byte between nodes counts as many
LEAST_GAIN = 8  # rows are exchanged if one of so many bytes is saved


def query_bytes(heads: distca.Heads) -> int:
    """The bytes in fp32 for a query row and one key/value head that is computed away from home: q goes there, out and
    lse come back; in backward q, dout, lse and delta go there and dq comes back.
    """
    return heads.q // heads.kv * (4 * heads.dim * 3 + 4 * heads.v_dim * 2 + 4 * 3)


def key_bytes(heads: distca.Heads) -> int:
    """The bytes in fp32 for a key row and one key/value head: k and v in both passes, and dk, dv back."""
    return (heads.dim + heads.v_dim) * 4 * 3


def one_document(rows: int, ranks: int) -> distca.Layout:
    """A document in order over the ranks, each of which has as many rows."""
    return distca.Layout.packed([rows * ranks], ranks=ranks, tokens_per_rank=rows)


def size_of_groups(heads: distca.Heads, ranks: int, moved: Callable[[int], int]) -> int:
    """The size that divides heads and ranks and moves the fewest bytes; 1 if it saves little."""
    best = min((p for p in range(1, ranks + 1) if heads.kv % p == 0 and ranks % p == 0), key=moved)
    return best if LEAST_GAIN * moved(best) <= (LEAST_GAIN - 1) * moved(1) else 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "heads",
    [distca.Heads(8, 8, 64), distca.Heads(16, 8, 64, 32), distca.Heads(64, 8, 16), distca.Heads(4, 1, 64),
     distca.Heads(32, 2, 64), distca.Heads(32, 32, 16)],
    ids=str,
)  # fmt: skip
def test_what_moves_is_the_least_over_all_sizes_of_groups(heads: distca.Heads, ranks: int) -> None:
    """With the full mask every rank has the same load at home. Nothing is left to balance."""
    rows = 256
    plan = distca.plan(one_document(rows, ranks), heads, mask="full")
    length = rows * ranks

    def moved(size: int) -> int:
        """In groups of this size, each rank computes the group's rows for one of `size` parts of the heads."""
        queries = length * heads.kv * (size - 1) // size
        keys = ranks * (length - rows) * heads.kv // size
        return queries * query_bytes(heads) + keys * key_bytes(heads)

    assert sum(plan.stats.bytes.values()) == moved(size_of_groups(heads, ranks, moved))
    assert plan.stats.imbalance_after == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_one_server_travel_in_the_input_dtype(dtype: torch.dtype) -> None:
    """A rank for each head moves 10,128 bytes a row, rows at home 12,288. With gradients in fp32, as several servers
    send them, it would be 10,896, which is not an eighth less.
    """
    heads, ranks, rows = distca.Heads(16, 4, 64, dtype=dtype), 4, 512
    query = 4 * (2 * 64 * 5 + 4 * 3)  # q, out, lse; q, dout, lse, delta, dq
    at_home, alone = 2 * 2 * 128 + 4 * 128, 2 * 2 * 128 + 2 * 128  # k, v in both passes; dk, dv
    length = ranks * rows
    by_size = {
        1: ranks * (length - rows) * 4 * at_home,
        2: length * 4 // 2 * query + ranks * (length - rows) * 4 // 2 * at_home,
        4: length * 4 * 3 // 4 * query + ranks * (length - rows) * 4 // 4 * alone,
    }
    plan = distca.plan(one_document(rows, ranks), heads, mask="full")
    assert sum(plan.stats.bytes.values()) == by_size[4] == min(by_size.values())


@pytest.mark.parametrize("ranks_per_node", [2, 4, 8])
@pytest.mark.parametrize("heads", [distca.Heads(16, 16, 64), distca.Heads(32, 8, 64)], ids=str)
def test_bytes_between_nodes_count_nine_times(heads: distca.Heads, ranks_per_node: int) -> None:
    rows, ranks = 256, 16
    plan = distca.plan(one_document(rows, ranks), heads, mask="full", ranks_per_node=ranks_per_node)

    def moved(size: int, neighbours: int) -> int:
        """Bytes that reach a rank from all but this many neighbours."""
        of_group = max(0, size - neighbours) * rows
        queries = ranks * of_group * heads.kv // size
        keys = ranks * (ranks - neighbours) * rows * heads.kv // size
        return queries * query_bytes(heads) + keys * key_bytes(heads)

    # The key gradients of rows on another node cross once for each contributing rank there, as keys do.
    best = size_of_groups(heads, ranks, lambda size: moved(size, 1) + (NODE_FACTOR - 1) * moved(size, ranks_per_node))
    assert sum(plan.stats.bytes.values()) == moved(best, 1)
    assert sum(plan.stats.bytes_between_nodes.values()) == moved(best, ranks_per_node)


def test_each_rank_computes_all_rows_of_its_group_for_its_share_of_the_heads() -> None:
    heads = distca.Heads(4, 4, 64)
    plan = distca.plan(distca.Layout.head_tail([8192], ranks=8), heads)
    chunk = 8192 // 16
    tasks = {(t.server, t.q_begin, t.q_end, t.kv_head_begin, t.kv_head_end) for t in plan.tasks}
    # Ranks 0 to 3 are a group, and 4 to 7. Rows 7 * chunk to 9 * chunk have one home, and are one task.
    assert tasks == {
        (server, begin * chunk, end * chunk, server % 4, server % 4 + 1)
        for server in range(8)
        for begin, end in (
            [(c, c + 1) for c in (0, 1, 2, 3, 12, 13, 14, 15)]
            if server < 4
            else [(4, 5), (5, 6), (6, 7), (7, 9), (9, 10), (10, 11), (11, 12)]
        )
    }
    assert plan.stats.imbalance_after == 1


def test_exchanging_happens_inside_nodes_where_it_can() -> None:
    """Attention of a head sees all keys. Those of other nodes come once for each head instead of once for each rank."""
    heads, layout = distca.Heads(8, 8, 128), distca.Layout.head_tail([1 << 17], ranks=64)
    plan = distca.plan(layout, heads, ranks_per_node=8)
    for task in plan.tasks:
        assert task.home // 8 == task.server // 8
    at_home = distca.plan(layout, heads, ranks_per_node=8, balance=False).stats
    assert at_home.imbalance_after == plan.stats.imbalance_after == 1
    assert 8 * sum(plan.stats.bytes_between_nodes.values()) == pytest.approx(
        sum(at_home.bytes_between_nodes.values()), rel=0.1
    )


@pytest.mark.parametrize(("window", "exchanges"), [(64, False), (16_384, True), (None, True)])
def test_short_windows_leave_rows_at_home(window: int | None, exchanges: bool) -> None:
    plan = distca.plan(one_document(2048, 8), distca.Heads(8, 8, 64), window=window, tolerance=0.6)
    assert any(task.home != task.server for task in plan.tasks) == exchanges


def test_groups_end_where_nodes_do_if_that_saves_bytes_between_them() -> None:
    """A document on 16 ranks begins in the middle of a node of 8. Groups of 4, 8 and 4 ranks exchange inside nodes."""
    shared = distca.Layout.head_tail([1 << 15], ranks=16)
    alone = [[(1 + i, 0, 8192)] for i in range(8)]
    layout = distca.Layout([*alone[:4], *(shared.segments(rank) for rank in range(16)), *alone[4:]])
    plan = distca.plan(layout, distca.Heads(64, 8, 64), ranks_per_node=8)
    assert plan.stats.head_parallel == {0: 8}
    exchanged = {(task.home, task.server) for task in plan.tasks if task.document == 0}
    assert exchanged == {
        (home, server) for group in (range(4, 8), range(8, 16), range(16, 20)) for home in group for server in group
    }


def test_a_rank_has_no_more_than_about_four_thousand_tasks() -> None:
    """Of 256 documents a rank has 512 segments. As groups of 16 ranks would make 8,192 tasks on each, they have 8."""
    layout = distca.Layout.head_tail([2048] * 256, ranks=16)
    plan = distca.plan(layout, distca.Heads(16, 16, 16), min_rows=64)
    assert plan.stats.head_parallel == dict.fromkeys(range(256), 8)


@pytest.mark.parametrize("min_rows", [1 << 20, 1 << 60, 1 << 62])
def test_pieces_as_large_as_can_be_said_leave_rows_at_home(min_rows: int) -> None:
    layout = distca.Layout.head_tail([1 << 18], ranks=8)
    assert distca.plan(layout, distca.Heads(8, 8, 64), min_rows=min_rows).stats.head_parallel == {}


@pytest.mark.parametrize("min_rows", [64, 65])
def test_segments_shorter_than_the_smallest_piece_are_not_exchanged(min_rows: int) -> None:
    layout = distca.Layout.head_tail([16 * 64], ranks=8)
    plan = distca.plan(layout, distca.Heads(8, 8, 64), min_rows=min_rows)
    assert any(task.home != task.server for task in plan.tasks) == (min_rows == 64)


@pytest.mark.parametrize(("kv", "ranks"), [(8, 3), (8, 5), (8, 6), (3, 2), (3, 8), (6, 4), (7, 7), (5, 16)])
def test_heads_that_no_number_of_ranks_divides_are_balanced_all_the_same(kv: int, ranks: int) -> None:
    heads, layout = distca.Heads(kv, kv, 64), distca.Layout.head_tail([ranks * 2048], ranks=ranks)
    plan = distca.plan(layout, heads, tolerance=0.01)
    at_home = distca.plan(layout, heads, balance=False)
    assert plan.stats.imbalance_after <= 1.01
    assert sum(plan.stats.bytes.values()) <= sum(at_home.stats.bytes.values())


@pytest.mark.parametrize("speeds", [[1, 2, 3, 4, 1, 2, 3, 4], [5, 1, 1, 1, 1, 1, 1, 1]])
def test_ranks_that_differ_in_speed_have_their_shares(speeds: list[int]) -> None:
    plan = distca.plan(distca.Layout.head_tail([1 << 15], ranks=8), distca.Heads(8, 8, 64), speeds=speeds)
    assert plan.stats.imbalance_after <= 1.05


@pytest.mark.parametrize("rates", [(), (*[(2048,)] * 9, (1024,))])
def test_costs_are_those_of_tasks_which_have_one_home(rates: tuple[tuple[int, ...], ...]) -> None:
    """Pairs of tasks of up to 256 rows cost twice as much as those of tasks of 512 rows and more."""
    cost = distca.CostModel(per_pair=1, per_row=7, rates=rates)
    heads = distca.Heads(8, 8, 64)
    # Ranks 0 to 3 share four documents, in segments of 256 rows; ranks 4 to 7 have one each.
    shared = distca.Layout.head_tail([2048] * 4, ranks=4)
    layout = distca.Layout([*(shared.segments(rank) for rank in range(4)), *([(4 + i, 0, 2048)] for i in range(4))])
    plan = distca.plan(layout, heads, cost=cost, tolerance=0.02)
    assert plan.stats.head_parallel == dict.fromkeys(range(4), 4)
    loads = [0] * 8
    for t in plan.tasks:
        rows = t.q_end - t.q_begin
        pairs = (t.q_begin + t.q_end + 1) * rows // 2
        factor = 2 - min(1.0, max(0.0, rows / 256 - 1)) if rates else 1
        loads[t.server] += (t.kv_head_end - t.kv_head_begin) * (round(factor * pairs) + 7 * rows)
    assert plan.stats.load == pytest.approx(loads, rel=1e-3)
    assert plan.stats.imbalance_after <= 1.02


def test_homes_that_do_not_serve_keep_nothing() -> None:
    layout = distca.Layout.head_tail([1 << 14], ranks=8)
    plan = distca.plan(layout, distca.Heads(8, 8, 64), servers=[0, 1, 2, 3])
    assert {task.server for task in plan.tasks} == {0, 1, 2, 3}
    assert plan.stats.imbalance_after <= 1.05


def test_documents_on_many_ranks_fit_into_the_default_heap() -> None:
    heads = distca.Heads(64, 8, 128, dtype=torch.bfloat16)
    layout = distca.Layout.head_tail([1 << 19], ranks=64)
    capacity = default_heap_bytes(8192, heads) // 2
    plan = distca.plan(layout, heads, capacity=capacity)
    assert plan.stats.binding is None and plan.stats.imbalance_after == 1
    with pytest.raises(distca.CapacityError):
        distca.plan(layout, heads, capacity=capacity, split_heads=False)


def test_where_memory_binds_heads_may_be_exchanged_though_that_moves_more_bytes() -> None:
    """Queries of 8 heads cost more bytes than the keys of seven other ranks, but those keys take more memory."""
    heads, layout = distca.Heads(64, 8, 128), distca.Layout.head_tail([1 << 15], ranks=8)
    free = distca.plan(layout, heads)
    assert all(task.home == task.server for task in free.tasks)
    roomy = distca.plan(layout, heads, capacity=free.stats.slot_bytes)
    assert roomy.digest == free.digest
    tight = distca.plan(layout, heads, capacity=free.stats.slot_bytes * 2 // 3)
    assert tight.stats.slot_bytes <= free.stats.slot_bytes * 2 // 3 and tight.stats.binding is None
    assert sum(tight.stats.bytes.values()) > sum(free.stats.bytes.values())


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_what_is_retained_does_not_change_who_computes_what(ranks_per_node: int | None) -> None:
    layout = distca.Layout.head_tail([20_000, 500, 9_000, 3_000], ranks=8, longer_than=1000)
    heads = distca.Heads(16, 8, 64)
    plans = [
        distca.plan(layout, heads, retain_bytes=most, ranks_per_node=ranks_per_node) for most in (0, 1 << 20, 1 << 40)
    ]
    assert plans[0].tasks == plans[1].tasks == plans[2].tasks
    assert plans[2].stats.saved_bytes > plans[1].stats.saved_bytes > 0


@examples(200)
@given(layouts(), st.sampled_from((1, 2, 3, 8)), st.sampled_from((None, 2)), st.sampled_from(("causal", "full")))
def test_a_layout_that_is_balanced_at_home_never_moves_more_than_it_would_there(
    layout: distca.Layout, kv: int, ranks_per_node: int | None, mask: str
) -> None:
    heads = distca.Heads(2 * kv, kv, 16)
    at_home = distca.plan(layout, heads, mask=mask, ranks_per_node=ranks_per_node, balance=False).stats
    if at_home.imbalance_after > 1.05:
        return
    stats = distca.plan(layout, heads, mask=mask, ranks_per_node=ranks_per_node, min_rows=1, objective="all").stats

    def weighted(s: distca.PlanStats) -> int:
        return sum(s.bytes.values()) + (NODE_FACTOR - 1) * sum(s.bytes_between_nodes.values())

    assert stats.imbalance_after <= 1.05
    assert weighted(stats) <= weighted(at_home)


@pytest.mark.parametrize("objective", ["all", "forward"])
def test_only_the_bytes_of_the_objective_count(objective: str) -> None:
    """Keys travel in backward as in forward, and their gradients; queries with more tensors than in forward."""
    for q, kv, ranks in itertools.product((8, 32, 64), (2, 8), (2, 4, 8)):
        heads = distca.Heads(q, kv, 64)
        stats = distca.plan(one_document(512, ranks), heads, mask="full", objective=objective).stats
        query = q // kv * (4 * 64 * 2 + 4) if objective == "forward" else query_bytes(heads)
        key = 4 * 64 * 2 if objective == "forward" else key_bytes(heads)

        def moved(size: int, query: int = query, key: int = key, kv: int = kv, ranks: int = ranks) -> int:
            queries = 512 * ranks * kv * (size - 1) // size
            return queries * query + ranks * 512 * (ranks - 1) * kv // size * key

        counted = stats.bytes if objective == "all" else {m: stats.bytes[m] for m in ("forward_in", "forward_out")}
        assert sum(counted.values()) == moved(size_of_groups(heads, ranks, moved))


@pytest.mark.parametrize(("lengths", "ranks"), [([2714], 5), ([940, 5359, 3585], 8)])
def test_a_tolerance_of_nothing_keeps_the_exchange(lengths: list[int], ranks: int) -> None:
    """Single rows keep plans with and without it from the tolerance. Without it, these would be balanced a little
    better, which is not worth half as many bytes again.
    """
    layout, heads = distca.Layout.head_tail(lengths, ranks=ranks), distca.Heads(4, 4, 16)
    exact = distca.plan(layout, heads, tolerance=0.0, min_rows=1)
    at_home = distca.plan(layout, heads, balance=False)
    assert len(exact.stats.head_parallel) == len(lengths)
    assert exact.stats.imbalance_after < 1.001
    assert sum(exact.stats.bytes.values()) < 0.75 * sum(at_home.stats.bytes.values())


def test_the_tolerance_is_kept_where_rows_at_home_keep_it() -> None:
    """Twelve heads over 16 ranks cannot be dealt evenly to a row."""
    layout = distca.Layout.head_tail([1 << 15], ranks=16)
    plan = distca.plan(layout, distca.Heads(12, 6, 64), tolerance=0.0)
    assert plan.stats.binding is None and plan.stats.imbalance_after == 1


def test_fewer_bytes_are_not_worth_a_larger_load_where_small_tasks_cost_more() -> None:
    """Ten heads over groups of ranks need cuts, and pairs of cut tasks cost twice as much."""
    cost = distca.CostModel(rates=(*[(2048,)] * 9, (1024,)))
    layout = distca.Layout.head_tail([1 << 14], ranks=32)
    plan = distca.plan(layout, distca.Heads(40, 10, 128), cost=cost, min_rows=1)
    at_home = distca.plan(layout, distca.Heads(40, 10, 128), cost=cost, balance=False)
    assert plan.stats.largest <= 1.002 * at_home.stats.largest


def test_a_little_too_little_memory_changes_little() -> None:
    """Larger groups would fit, and move twice the bytes."""
    heads = distca.Heads(64, 8, 128, dtype=torch.bfloat16)
    layout = one_document(16_384, 4)
    free = distca.plan(layout, heads).stats
    tight = distca.plan(layout, heads, capacity=free.slot_bytes - 1).stats
    assert tight.imbalance_after <= 1.05
    assert sum(tight.bytes.values()) <= 1.05 * sum(free.bytes.values())


def test_a_plan_may_need_less_memory_than_rows_at_home() -> None:
    """The rank with the end of the longest document needs all of its keys, and computes only a part of them."""
    heads = distca.Heads(32, 8, 128, dtype=torch.bfloat16)
    layout = distca.Layout.packed([100_000, *[8000] * 20], ranks=16, tokens_per_rank=16_250)
    free, at_home = (distca.plan(layout, heads, balance=balance).stats for balance in (True, False))
    assert free.slot_bytes < 0.9 * at_home.slot_bytes
    tight = distca.plan(layout, heads, capacity=round(0.99 * free.slot_bytes)).stats
    assert tight.imbalance_after <= 1.06


def test_statistics_say_how_many_ranks_exchange() -> None:
    layout = distca.Layout.head_tail([1 << 14, 300, 1 << 15], ranks=8, longer_than=1000)
    plan = distca.plan(layout, distca.Heads(4, 4, 64))
    assert plan.stats.head_parallel == {0: 4, 2: 4}
    assert distca.plan(layout, distca.Heads(4, 4, 64), balance=False).stats.head_parallel == {}
    # Groups are even: of nine ranks, four and five share eight heads.
    nine = distca.Layout.head_tail([1 << 15], ranks=9)
    assert distca.plan(nine, distca.Heads(8, 8, 64)).stats.head_parallel == {0: 5}
    given = [(t.document, t.q_begin, t.q_end, t.kv_head_begin, t.kv_head_end, t.server) for t in plan.tasks]
    assert distca.plan(layout, distca.Heads(4, 4, 64), tasks=given).stats.head_parallel == {}
