"""Strategies that cut documents: their steps and bytes by formula, and examples that were added up by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distca
from distca.simulator.case import Documents
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import StrategyResult, simulate
from distca.simulator.strategies.ring import ring_work
from distca.simulator.strategies.ulysses import exchanged_bytes
from distca.simulator.strategies.ulysses_ring import ulysses_ring_work
from support.simulated import FLAT, MODEL, cluster

HEADS = distca.Heads(q=4, kv=2, dim=8, dtype=torch.bfloat16)
NS = 1e-9


def _simulated(name: str, documents: Documents, shape: Parallelism, **changes: int) -> StrategyResult:
    (result,) = simulate(
        documents,
        cluster=cluster(shape.homes * shape.tensor),
        model=dataclasses.replace(MODEL, **changes),
        parallelism=shape,
        strategies=[name],
    )
    return result


def _attention_bytes(name: str, documents: Documents, shape: Parallelism, **changes: int) -> float:
    """Bytes of a step that are neither gradients nor new weights."""
    alone = _simulated("unbalanced", documents, shape, **changes)
    return _simulated(name, documents, shape, **changes).bytes_inside - alone.bytes_inside


def test_a_ring_of_two_by_hand() -> None:
    # Chunks of 2 rows of 8: rank 0 has rows 0, 1, 6, 7 and rank 1 has rows 2 to 5.
    layout = distca.Layout.head_tail([8], ranks=2)
    work = ring_work(layout, [[0, 1]], HEADS, FLAT)
    # Step 0: each chunk sees itself (3 pairs), and the later chunk the earlier one (4 pairs): 10.
    # Step 1: rank 0's rows 6, 7 see rank 1's four (8); rank 1's four rows see rank 0's rows 0, 1 (8). 36 pairs in all.
    seconds = torch.stack([took for took, _ in work["forward"].ring])
    assert torch.allclose(seconds, torch.tensor([[10.0, 10.0], [8.0, 8.0]], dtype=torch.float64) * 4 * NS)
    # Backward ends with the rank's own keys, and takes twice as long.
    seconds = torch.stack([took for took, _ in work["backward"].ring])
    assert torch.allclose(seconds, torch.tensor([[8.0, 8.0], [10.0, 10.0]], dtype=torch.float64) * 8 * NS)
    # 4 rows, 2 heads of keys and of values, 8 numbers, 2 bytes: 256 bytes.
    sent = [[passed[0, 1].item(), passed[1, 0].item()] for _, passed in work["forward"].ring]
    assert sent == [[256, 256], [0, 0]]
    sent = [[passed[0, 1].item(), passed[1, 0].item()] for _, passed in work["backward"].ring]
    assert sent == [[256, 256], [256, 256]]  # keys, and then gradients


def test_keys_go_round_a_ring_and_gradients_come_home() -> None:
    layout = distca.Layout.head_tail([80], ranks=4)
    work = ring_work(layout, [[0, 1, 2, 3]], HEADS, FLAT)
    keys = 20 * 64  # 20 rows of 64 bytes
    for phase, rank, other, messages in (("forward", 1, 2, [1, 1, 1, 0]), ("backward", 1, 0, [1, 2, 2, 1])):
        passed = [matrix for _, matrix in work[phase].ring]
        assert [matrix[rank, other].item() for matrix in passed] == [n * keys for n in messages]
        assert [matrix.sum().item() for matrix in passed] == [4 * n * keys for n in messages]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_a_ring_computes_every_pair_once(lengths: list[int], ranks: int) -> None:
    layout = distca.Layout.head_tail(lengths, ranks=ranks)
    work = ring_work(layout, [list(range(ranks))], HEADS, FLAT)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    for phase, each in (("forward", 4), ("backward", 8)):
        assert len(work[phase].ring) == ranks
        assert sum(float(took.sum()) for took, _ in work[phase].ring) == pytest.approx(pairs * each * NS)


def test_rings_of_different_sizes_run_beside_each_other() -> None:
    first, second = distca.Layout.head_tail([64], ranks=4), distca.Layout.head_tail([64], ranks=2)
    layout = distca.Layout.join([(first, [0, 1, 2, 3]), (second, [4, 5])], num_ranks=6)
    forward = ring_work(layout, [[0, 1, 2, 3], [4, 5]], HEADS, FLAT)["forward"].ring
    assert [(took > 0).tolist() for took, _ in forward] == [[True] * 6] * 2 + [[True] * 4 + [False] * 2] * 2
    assert [int((passed > 0).sum()) for _, passed in forward] == [6, 4, 4, 0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bytes_of_a_ring_and_of_all_gather_are_those_of_the_formulas(ranks: int) -> None:
    shape, documents = Parallelism(context=ranks), [[[8000]] + [[]] * (ranks - 1)]
    keys = 8000 * 2 * 4 * 128 * 2  # of the whole document, in bytes
    layers = MODEL.layers
    # A rank sends its keys P - 1 times in forward; in backward keys and gradients P - 1 times each.
    assert _attention_bytes("ring", documents, shape) == pytest.approx(layers * 3 * (ranks - 1) * keys)
    # Keys are gathered once, and their gradients reduced once.
    assert _attention_bytes("all-gather", documents, shape) == pytest.approx(layers * 2 * (ranks - 1) * keys)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_bytes_of_ulysses_are_those_of_the_formula(ranks: int) -> None:
    shape, documents = Parallelism(context=ranks), [[[8000]] + [[]] * (ranks - 1)]
    key_heads = max(4, ranks)  # four, repeated for more ranks
    numbers = 8000 * (8 + 2 * key_heads + 8) * 128  # queries, keys, values and outputs of all rows
    wanted = MODEL.layers * 2 * numbers * 2 * (ranks - 1) / ranks  # forward and backward, 2 bytes a number
    assert _attention_bytes("ulysses", documents, shape) == pytest.approx(wanted)


def test_an_exchange_of_ulysses_by_hand() -> None:
    # 10 rows, 4 query and 2 key/value heads of 8 numbers of 2 bytes, 2 ranks: a rank sends half of its 4 + 2 + 2 heads.
    assert exchanged_bytes(10, HEADS, 2) == (10 * 4 * 16, 10 * 2 * 16)
    # 4 ranks: one query head and one repeated key/value head for each.
    assert exchanged_bytes(10, HEADS, 4) == (10 * 3 * 16, 10 * 16)


def test_ulysses_gives_all_ranks_of_a_group_the_same_attention() -> None:
    shape = Parallelism(data=2, context=2)
    documents = [[[5000, 300], [800], [20], [1]]]
    result = _simulated("ulysses", documents, shape)
    alone = _simulated("unbalanced", documents, shape)
    assert result.idle[0] == pytest.approx(result.idle[1], abs=1e-6)
    assert result.mfu > alone.mfu


@pytest.mark.parametrize(("ranks", "kv"), [(8, 4), (8, 2), (6, 2), (4, 2)])
def test_the_bytes_of_ulysses_with_a_ring_are_those_of_both(ranks: int, kv: int) -> None:
    """As many neighbours as key/value heads exchange rows for heads, and all with the same head are a ring."""
    shape, documents = Parallelism(context=ranks), [[[9600]] + [[]] * (ranks - 1)]
    exchanged = MODEL.layers * 2 * 9600 * (8 + 2 * kv + 8) * 128 * 2 * (kv - 1) / kv
    passed = MODEL.layers * 3 * (ranks // kv - 1) * 9600 * 2 * kv * 128 * 2
    found = _attention_bytes("ulysses-ring", documents, shape, kv_heads=kv)
    assert found == pytest.approx(exchanged + passed)


def test_ulysses_with_a_ring_by_hand() -> None:
    # Chunks of one row of 8: the homes have rows 0 and 7, 1 and 6, 2 and 5, 3 and 4. In pairs: 0, 1, 6, 7, and 2 to 5.
    layout = distca.Layout.head_tail([8], ranks=4)
    work = ulysses_ring_work(layout, 4, 2, HEADS, FLAT)
    # As in the ring of two, with half of the four query heads.
    seconds = torch.stack([took for took, _ in work["forward"].ring])
    assert torch.allclose(seconds, torch.tensor([[10.0] * 4, [8.0] * 4], dtype=torch.float64) * 2 * NS)
    # A home passes four rows of one head of keys and of values, 8 numbers of 2 bytes, to the one with its head.
    passed = work["forward"].ring[0][1]
    assert {(i, j): bytes for (i, j), bytes in _above_zero(passed)} == {
        (0, 2): 128,
        (1, 3): 128,
        (2, 0): 128,
        (3, 1): 128,
    }
    # Before that, half of the 4 + 2 + 2 heads of two rows go to the neighbour, and half of 4 heads come back.
    assert work["forward"].inward is not None and work["forward"].homeward is not None
    for matrix, sent in ((work["forward"].inward, 2 * 4 * 16), (work["forward"].homeward, 2 * 2 * 16)):
        assert dict(_above_zero(matrix)) == dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], sent)


def _above_zero(matrix: torch.Tensor) -> list[tuple[tuple[int, int], float]]:
    return [((int(i), int(j)), float(matrix[i, j])) for i, j in matrix.nonzero()]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.sampled_from([(2, 4), (2, 6), (2, 8)]))
@settings(max_examples=20)
def test_ulysses_with_a_ring_computes_every_pair_once(lengths: list[int], sizes: tuple[int, int]) -> None:
    size, ranks = sizes
    work = ulysses_ring_work(distca.Layout.head_tail(lengths, ranks=ranks), ranks, size, HEADS, FLAT)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    for phase, each in (("forward", 4), ("backward", 8)):
        assert sum(float(took.sum()) for took, _ in work[phase].ring) == pytest.approx(pairs * each * NS)


def test_ulysses_with_a_ring_needs_more_ranks_than_share_the_heads() -> None:
    documents = [[[6000], *[[]] * 3]]
    with pytest.raises(distca.InvalidArgumentError, match="context = 4 and 4 key/value heads of a tensor rank"):
        _simulated("ulysses-ring", documents, Parallelism(context=4))
    names = {
        one.strategy for one in simulate(documents, cluster=cluster(4), model=MODEL, parallelism=Parallelism(context=4))
    }
    assert "ulysses" in names and "ulysses-ring" not in names


def test_a_ring_begins_after_the_exchange_of_rows_for_heads() -> None:
    model = dataclasses.replace(MODEL, layers=1, q_heads=4, kv_heads=2)
    links = cluster(4)
    links = dataclasses.replace(
        links, device=FLAT, inside=dataclasses.replace(links.inside, bandwidth=1e9, latency=1e-6)
    )
    shape, documents = Parallelism(context=4), [[[4000], [], [], []]]
    (result,) = simulate(
        documents, cluster=links, model=model, parallelism=shape, strategies=["ulysses-ring"], record=True
    )
    of_step = [event for event in result.events if event.call is not None and (event.end > event.begin).all()]
    assert [event.what for event in of_step[:2]] == ["wait", "attention"]
    # A home has 1,000 rows. Half of 4 + 2 + 2 heads of 128 numbers of 2 bytes go to its neighbour, at 1 GB/s.
    assert (of_step[0].end - of_step[0].begin).tolist() == pytest.approx([1000 * 4 * 256 * NS + 1e-6] * 4, rel=0.02)


def test_ulysses_is_limited_by_the_heads() -> None:
    documents = [[[600], *[[]] * 15]]
    shape = Parallelism(context=16)
    with pytest.raises(distca.InvalidArgumentError, match="context = 16; a divisor of the 8 query heads"):
        _simulated("ulysses", documents, shape)
    names = {result.strategy for result in simulate(documents, cluster=cluster(16), model=MODEL, parallelism=shape)}
    assert "ring" in names and "ulysses" not in names


def test_a_ring_hides_its_messages_behind_attention_and_all_gather_does_not() -> None:
    shape, documents = Parallelism(context=4), [[[60000], [], [], []]]
    ring, gathered = (_simulated(name, documents, shape) for name in ("ring", "all-gather"))
    assert 2 * ring.exposed_communication < gathered.exposed_communication


def test_a_step_of_a_ring_ends_with_the_slower_of_computation_and_message() -> None:
    shape, documents = Parallelism(context=2), [[[8], []]]
    model = dataclasses.replace(MODEL, layers=1, q_heads=4, kv_heads=2)
    links = cluster(2)
    links = dataclasses.replace(
        links, device=FLAT, inside=dataclasses.replace(links.inside, bandwidth=1e9, latency=1e-6)
    )
    (result,) = simulate(documents, cluster=links, model=model, parallelism=shape, strategies=["ring"], record=True)
    waits = [
        (event.end - event.begin)[0].item()
        for event in result.events
        if event.what == "wait" and event.call is not None and (event.end > event.begin).any()
    ]
    # A message has 4 rows of 2 x 2 x 128 numbers of 2 bytes: 4,096 bytes, 4,096 ns and the latency of 1,000 ns.
    # Forward: step 0 computes for 10 pairs x 4 heads x 1 ns. Backward: 8 pairs x 8, and then 10 x 8 with the gradients.
    assert waits == pytest.approx([(5096 - 40) * NS, (5096 - 64) * NS, (5096 - 80) * NS])
