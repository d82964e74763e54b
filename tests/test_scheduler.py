"""The scheduler: the cheapest shards, no more moved than must be, whatever the numbers of the ranks."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

import distca

HEADS = distca.Heads(8, 2, 64)


def pairs(begin: int, end: int) -> int:
    """Row i of a causal document sees keys 0 .. i."""
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
    """q there and out, lse back; q, dout, lse, delta there and dq back. In fp32."""
    return heads.q * (4 * heads.dim + 4 * heads.v_dim + 4 + 4 * heads.dim + 4 * heads.v_dim + 4 + 4 + 4 * heads.dim)


def key_row_bytes(heads: distca.Heads) -> int:
    """k, v there, twice; dk, dv back. In fp32."""
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
    cheapest = None
    for begin in range(length):
        for end in range(begin + 1, length + 1):
            if pairs(0, length) - pairs(begin, end) > limit:
                continue
            if pairs(0, other) + pairs(begin, end) > limit:
                break
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
        # The last piece that leaves may be a little larger than needed, since it has min_rows rows at least.
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
    """900 of 1000 rows would do, but then 100 are left: 872 go, and 128 of the other document."""
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
    # Whole documents go where they can: most are in one piece.
    assert len(plan.tasks) < sum(map(len, documents)) + 10 * len(servers)


@pytest.mark.parametrize("mask,window", [("causal", 64), ("causal", 3000), ("full", None)])
def test_windows_and_full_masks_are_balanced(mask: str, window: int | None) -> None:
    documents = heavy_tailed(16, 8192, 3)
    documents[:4] = [[], [], [8192, 8192], [8192]]
    plan = distca.plan(
        distca.Layout.from_documents(documents), HEADS, mask=mask, window=window, tolerance=0.01, min_rows=64
    )
    assert plan.stats.imbalance_before > 1.5
    assert plan.stats.imbalance_after <= 1.01
