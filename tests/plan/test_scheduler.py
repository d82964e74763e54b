"""The scheduler picks the cheapest shards, moves no more than needed, and does not depend on the ranks' numbers."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

import distca

HEADS = distca.Heads(8, 2, 64)


def pairs(begin: int, end: int) -> int:
    """The visible pairs of rows [begin, end) of a causal document, where row i sees keys 0 .. i."""
    return (begin + end + 1) * (end - begin) // 2


def heavy_tailed(ranks: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    of_ranks: list[list[int]] = []
    for _ in range(ranks):
        room, lengths = tokens, []
        while room:
            lengths.append(min(room, max(1, int(rng.lognormvariate(6.0, 1.5)))))
            room -= lengths[-1]
        of_ranks.append(lengths)
    return of_ranks


def query_row_bytes(heads: distca.Heads) -> int:
    """The bytes in fp32 that travel for a query row: q goes there and out, lse come back; in backward q, dout, lse and
    delta go there and dq comes back.
    """
    return heads.q * (4 * heads.dim + 4 * heads.v_dim + 4 + 4 * heads.dim + 4 * heads.v_dim + 4 + 4 + 4 * heads.dim)


def key_row_bytes(heads: distca.Heads) -> int:
    """The bytes in fp32 that travel for a key row: k and v in both passes, and dk, dv back."""
    return heads.kv * (heads.dim + heads.v_dim) * 4 * 3


@pytest.mark.parametrize("heads", [HEADS, distca.Heads(8, 8, 64), distca.Heads(16, 1, 32, 64)])
@pytest.mark.parametrize("other", [500, 2000, 2900])
def test_one_moved_shard_costs_hardly_more_bytes_than_the_cheapest_there_is(heads: distca.Heads, other: int) -> None:
    length = 3000
    layout = distca.Layout.from_documents([[length], [other]])
    plan = distca.plan(layout, heads, tolerance=0.001, min_rows=1, split_heads=False)
    total = pairs(0, length) + pairs(0, other)
    limit = Fraction(total * 1001, 2000)
    assert max(plan.stats.load) <= limit * heads.q
    cheapest, end = None, 1
    for begin in range(length):
        # The shortest shard from here that takes enough away is the cheapest. It ends after that of the row before.
        while end <= length and (end <= begin or pairs(0, length) - pairs(begin, end) > limit):
            end += 1
        if end <= length and pairs(0, other) + pairs(begin, end) <= limit:
            moved = (end - begin) * query_row_bytes(heads) + end * key_row_bytes(heads)
            cheapest = moved if cheapest is None else min(cheapest, moved)
    assert cheapest is not None
    assert cheapest <= sum(plan.stats.bytes.values()) <= 1.02 * cheapest


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_only_what_lies_above_the_limits_is_moved(tolerance: float, seed: int) -> None:
    documents = heavy_tailed(16, 8192, seed)
    layout = distca.Layout.from_documents(documents)
    min_rows = 16
    plan = distca.plan(layout, HEADS, tolerance=tolerance, min_rows=min_rows)
    before = [sum(pairs(0, length) for length in lengths) for lengths in documents]
    limit = (1 + tolerance) * sum(before) / 16
    assert max(plan.stats.load) <= limit * HEADS.q
    left = [0.0] * 16
    for task in plan.tasks:
        if task.server != task.home:
            share = (task.kv_head_end - task.kv_head_begin) / HEADS.kv
            left[task.home] += share * pairs(task.q_begin, task.q_end)
    for rank in range(16):
        # The last piece that leaves may be a little larger than needed, because it has at least min_rows rows.
        longest = max(documents[rank])
        smallest_piece = pairs(longest - min_rows, longest) if before[rank] > limit else 0
        assert left[rank] <= max(0.0, before[rank] - limit) + smallest_piece


@pytest.mark.parametrize("seed", range(4))
def test_renumbering_the_ranks_hardly_changes_the_bytes(seed: int) -> None:
    documents = heavy_tailed(64, 16384, seed)
    moved = []
    for shuffle in range(4):
        shuffled = documents[:]
        if shuffle:
            random.Random(shuffle).shuffle(shuffled)
        plan = distca.plan(distca.Layout.from_documents(shuffled), HEADS, tolerance=0.01, min_rows=64)
        assert plan.stats.imbalance_after <= 1.01
        moved.append(sum(plan.stats.bytes.values()))
    assert max(moved) <= 1.01 * min(moved)


@pytest.mark.parametrize("min_rows", [1, 64, 128, 512])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_no_shorter_than_wanted(min_rows: int, seed: int) -> None:
    layout = distca.Layout.from_documents(heavy_tailed(32, 32768, seed))
    plan = distca.plan(layout, HEADS, tolerance=0.02, min_rows=min_rows)
    assert plan.stats.imbalance_before > 1.5
    assert plan.stats.imbalance_after <= 1.02
    for task in plan.tasks:
        whole = (task.q_begin, task.q_end) == (0, layout.document_lengths[task.document])
        assert whole or task.q_end - task.q_begin >= min_rows


def test_what_a_shard_leaves_is_no_shorter_either() -> None:
    """Moving 900 of 1000 rows would balance, but leave 100. Therefore 872 rows move, and 128 of the other document."""
    layout = distca.Layout.from_documents([[1000, 1000], [316]])
    plan = distca.plan(layout, HEADS, mask="full", tolerance=0.05, min_rows=128)
    assert plan.stats.imbalance_after <= 1.05
    assert min(task.q_end - task.q_begin for task in plan.tasks) == 128


def test_dedicated_servers_compute_everything_and_nobody_else_anything() -> None:
    documents = heavy_tailed(12, 8192, 7)
    servers = [1, 5, 6]
    plan = distca.plan(distca.Layout.from_documents(documents), HEADS, servers=servers, tolerance=0.01, min_rows=32)
    assert {task.server for task in plan.tasks} == set(servers)
    assert plan.stats.imbalance_after <= 1.01
    # Documents move whole where they can, so most are in one piece.
    assert len(plan.tasks) < sum(map(len, documents)) + 10 * len(servers)


@pytest.mark.parametrize("mask,window", [("causal", 64), ("causal", 3000), ("full", None), ("full", 500)])
def test_windows_and_full_masks_are_balanced(mask: str, window: int | None) -> None:
    documents = heavy_tailed(16, 8192, 3)
    documents[:4] = [[], [], [8192, 8192], [8192]]
    plan = distca.plan(
        distca.Layout.from_documents(documents), HEADS, mask=mask, window=window, tolerance=0.01, min_rows=64
    )
    assert plan.stats.imbalance_before > 1.5
    assert plan.stats.imbalance_after <= 1.01


def test_no_load_is_less_than_a_row_in_the_middle_costs_where_a_window_reaches_to_both_sides() -> None:
    layout = distca.Layout.from_documents([[5], *[[]] * 12])
    stats = distca.plan(layout, distca.Heads(q=1, kv=1, dim=16), mask="full", window=2, tolerance=0.0, min_rows=1).stats
    assert sum(stats.load_before) == 2 + 3 + 3 + 3 + 2
    assert stats.lower_bound == stats.largest == 3


def test_nothing_is_proven_of_bytes_where_a_window_reaches_to_both_sides() -> None:
    layout = distca.Layout.from_documents([[4096], [100]])
    windows = (None, 4096, 256)  # the second one hides nothing
    stats = [distca.plan(layout, HEADS, mask="full", window=window, tolerance=0.0).stats for window in windows]
    assert min(stats[0].bytes_lower_bound, stats[1].bytes_lower_bound) > 0 == stats[2].bytes_lower_bound
    assert all(one.imbalance_after < 1.01 for one in stats)


@pytest.mark.parametrize("seed", range(4))
def test_renumbering_the_nodes_hardly_changes_the_bytes(seed: int) -> None:
    documents = heavy_tailed(64, 16384, seed)
    nodes = [documents[begin : begin + 8] for begin in range(0, 64, 8)]
    moved = []
    for shuffle in range(4):
        if shuffle:
            random.Random(shuffle).shuffle(nodes)
            for node in nodes:
                random.Random(shuffle).shuffle(node)
        layout = distca.Layout.from_documents([of_rank for node in nodes for of_rank in node])
        plan = distca.plan(layout, HEADS, tolerance=0.01, min_rows=64, ranks_per_node=8)
        assert plan.stats.imbalance_after <= 1.01
        moved.append((sum(plan.stats.bytes.values()), sum(plan.stats.bytes_between_nodes.values())))
    for of_plans in zip(*moved, strict=True):
        assert max(of_plans) <= 1.01 * min(of_plans)


def step_cost(rows: int, begin: int, dear: int) -> float:
    """The cost of a task: a pair costs `dear` times as much in tasks of up to 1024 rows as in those of 2048 and more,
    and in between the factor falls evenly.
    """
    factor = dear + (1 - dear) * min(1.0, max(0.0, rows / 1024 - 1))
    return factor * pairs(begin, begin + rows)


@pytest.mark.parametrize("dear", [2, 4])
@pytest.mark.parametrize("ranks_per_node", [None, 8])
@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@pytest.mark.parametrize("whole_documents", [True, False])
def test_predicted_time_is_balanced_where_small_tasks_are_dearer(
    dear: int, ranks_per_node: int | None, tolerance: float, whole_documents: bool
) -> None:
    documents = heavy_tailed(32, 8192, dear)
    layout = distca.Layout.from_documents(documents)
    if not whole_documents:
        lengths = [length for of_rank in documents for length in of_rank]
        layout = distca.Layout.packed(sorted(lengths), ranks=32, tokens_per_rank=8192)
    cost = distca.CostModel(per_pair=16, rates=(*[(dear * 1024,)] * 11, (1024,)))
    plan = distca.plan(layout, HEADS, tolerance=tolerance, cost=cost, ranks_per_node=ranks_per_node)
    assert plan.stats.imbalance_before > 1.5
    assert plan.stats.binding is None
    assert plan.stats.bytes_lower_bound == 0
    load = [0.0] * 32
    for task in plan.tasks:
        heads = task.kv_head_end - task.kv_head_begin
        load[task.server] += heads * step_cost(task.q_end - task.q_begin, task.q_begin, dear)
    assert max(load) <= (1 + tolerance) * sum(load) / 32 * 1.001


def test_a_table_of_ones_gives_the_plan_of_pairs_but_for_bounds_that_are_proven_no_more() -> None:
    layout = distca.Layout.from_documents(heavy_tailed(16, 8192, 5))
    plain = distca.plan(layout, HEADS, tolerance=0.01)
    rated = distca.plan(layout, HEADS, tolerance=0.01, cost=distca.CostModel(rates=((1024, 1024), (1024, 1024))))
    assert rated.tasks == plain.tasks
    assert rated.stats.load == plain.stats.load
    assert rated.stats.lower_bound == plain.stats.lower_bound
    assert plain.stats.bytes_lower_bound > 0 == rated.stats.bytes_lower_bound


@pytest.mark.parametrize("servers", [None, list(range(0, 32, 2))])
def test_a_little_too_little_capacity_costs_a_little_balance(servers: list[int] | None) -> None:
    layout = distca.Layout.from_documents(heavy_tailed(32, 65536, 1))
    free = distca.plan(layout, HEADS, tolerance=0.01, servers=servers, capacity=2**62).stats
    assert free.binding is None
    for share, imbalance in ((0.98, 1.15), (0.9, 1.4)):
        capacity = int(free.slot_bytes * share)
        stats = distca.plan(layout, HEADS, tolerance=0.01, servers=servers, capacity=capacity).stats
        assert stats.slot_bytes <= capacity
        assert stats.wanted_slot_bytes == free.slot_bytes
        assert stats.imbalance_after <= imbalance < stats.imbalance_before
        assert (stats.binding is None) == (stats.imbalance_after <= 1.01)


def test_what_keeps_a_plan_from_the_tolerance_is_named() -> None:
    def binding(**options: object) -> str | None:
        layout = distca.Layout.from_documents([[4, 3], []])
        return distca.plan(layout, distca.Heads(1, 1, 8), tolerance=0.01, **options).stats.binding  # type: ignore[arg-type]

    # The rows cost 1 to 4 and 1 to 3, together 16, and can be split into 8 and 8.
    assert binding() is None
    assert binding(cost=distca.CostModel(1, 100)) == "single rows"
    assert binding(capacity=1) == "capacity of rank 1"
    assert binding(balance=False) == "balance off"
    assert binding(tasks=[(0, 0, 4, 0, 1, 0), (1, 0, 3, 0, 1, 1)]) == "given tasks"
