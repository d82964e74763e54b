"""WLB-LLM: what is delayed and for how long, how sequences are packed and cut, and examples by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.simulator.case import Case
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import simulate
from distca.simulator.strategies.outliers import OutlierQueues, pack, pack_step
from distca.simulator.strategies.wlb import by_sequence, longest_sequence, sharded
from support.simulated import DEVICE, MODEL, cluster


def _squared(length: int) -> float:
    return float(length**2)


def test_delay_by_hand() -> None:
    # Documents of 8 and more wait until two have come. The last batch's one goes out with it.
    steps = pack([[9, 1, 1], [1, 9, 2], [9]], 2, 100, _squared, thresholds=[8])
    assert steps == [[[1], [1]], [[9, 2], [9, 1]], [[9], []]]


def test_two_levels_by_hand() -> None:
    queues = OutlierQueues([4, 8], 2)
    assert queues.pass_through([3, 4, 9, 5]) == [3, 4, 5]  # two of the first level have come
    assert queues.waiting == [[], [9]]
    assert queues.pass_through([8, 7]) == [9, 8]
    assert queues.waiting == [[7], []]
    assert queues.empty() == [7] and queues.waiting == [[], []]


def test_packing_by_hand() -> None:
    # 6 has work 36 and three of 3 have 27. The fourth would make 12 tokens there, and goes to the 6.
    assert pack_step([3, 6, 3, 3, 3], 2, 10, _squared) == ([[6, 3], [3, 3, 3]], [])
    # Neither 9 leaves room for 3.
    assert pack_step([9, 3, 9], 2, 10, _squared) == ([[9], [9]], [3])
    assert pack([[9, 3, 9]], 2, 10, _squared) == [[[9], [9]], [[3], []]]


batches = st.lists(st.lists(st.integers(1, 20), max_size=12), min_size=1, max_size=6)


@given(batches, st.integers(1, 4), st.integers(20, 60), st.lists(st.integers(1, 20), max_size=2, unique=True))
def test_every_document_is_in_one_step_and_no_micro_batch_is_too_long(
    batches: list[list[int]], count: int, longest: int, thresholds: list[int]
) -> None:
    steps = pack(batches, count, longest, _squared, thresholds)
    packed = [n for step in steps for micro_batch in step for n in micro_batch]
    assert sorted(packed) == sorted(n for batch in batches for n in batch)
    assert all(len(step) == count and max(map(sum, step)) <= longest for step in steps)


@given(batches, st.integers(1, 4), st.integers(2, 20))
def test_outliers_wait_in_order_for_as_many_as_there_are_micro_batches_and_nothing_else_waits(
    batches: list[list[int]], count: int, threshold: int
) -> None:
    steps = pack(batches, count, 10**6, _squared, [threshold])
    assert len(steps) == len(batches)
    arrived = gone = 0
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True)):
        out = [n for micro_batch in step for n in micro_batch]
        assert sorted(n for n in out if n < threshold) == sorted(n for n in batch if n < threshold)
        arrived += sum(n >= threshold for n in batch)
        gone += sum(n >= threshold for n in out)
        # Whole sets leave, at most one a step; after the last batch none waits.
        wanted = count if arrived - gone + sum(n >= threshold for n in out) >= count else 0
        if number < len(batches) - 1:
            assert sum(n >= threshold for n in out) == wanted
    assert arrived == gone
    in_order = [n for batch in batches for n in batch if n >= threshold]
    first = [n for micro_batch in steps[0] for n in micro_batch if n >= threshold]
    assert len(batches) == 1 or sorted(first) == sorted(in_order[: len(first)])


def test_sequences_are_cut_by_hand() -> None:
    # 6 + 2 tokens in four chunks of 2: rank 0 has the first and the last.
    layout = by_sequence([6, 2], 2)
    assert layout.segments(0) == [(0, 0, 2), (1, 0, 2)] and layout.segments(1) == [(0, 2, 4), (0, 4, 6)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 5))
def test_sequences_are_cut_into_equal_tokens(lengths: list[int], ranks: int) -> None:
    layout = by_sequence(lengths, ranks)
    rows = [layout.num_rows(rank) for rank in range(ranks)]
    assert sum(rows) == sum(lengths) and max(rows) - min(rows) <= 2
    assert layout.document_lengths == lengths


def _case(shape: Parallelism, documents: list[list[list[int]]], memory: float = 1e12) -> Case:
    links = dataclasses.replace(cluster(shape.homes), device=dataclasses.replace(DEVICE, memory=memory))
    return Case(documents, links, MODEL, shape)


def test_long_documents_are_cut_one_by_one_and_short_ones_together() -> None:
    case = _case(Parallelism(context=4), [[[1], [], [], []]])
    # One document of 32K and short ones: by sequence rank 0 has the late rows alone. By document all is balanced.
    lengths = [1024] * 32 + [32768]
    assert len(sharded(case, lengths).segments(0)) == 2 * len(lengths)
    # 1,024 documents of 64 rows: pieces of 8 rows would take the time of a tile of 128.
    lengths = [64] * 1024
    assert len(sharded(case, lengths).segments(0)) < len(lengths)


def test_the_longest_sequence_is_what_memory_allows() -> None:
    shape, documents = Parallelism(data=2), [[[1000], [1000]]]
    case = _case(shape, documents)
    states, of_row = case.state_bytes, case.activation_bytes(1, 1)
    assert longest_sequence([_case(shape, documents, states + 5000.5 * of_row)]) == 5000
    assert longest_sequence([_case(shape, documents, states + 10 * of_row)]) == 1000


def test_delay_pays_where_outliers_come_one_by_one() -> None:
    # Four sequences a step and one long document: three ranks wait, or the long ones wait until there are four.
    shape = Parallelism(data=4)
    documents = [[[60000], [1000] * 20, [1000] * 20, [1000] * 20]]
    plain, delayed = simulate(
        documents,
        following=[documents] * 7,
        cluster=cluster(4, speed=1e4),
        model=MODEL,
        parallelism=shape,
        strategies=["wlb-no-delay", "wlb"],
    )
    # Eight steps with one long document each; or two with four of them, and six without.
    assert delayed.seconds < 0.5 * plain.seconds
    assert delayed.tokens_per_second * delayed.seconds == pytest.approx(120_000)


def test_delay_needs_several_steps() -> None:
    shape, documents = Parallelism(data=2), [[[5000], [100]]]
    one = simulate(documents, cluster=cluster(2), model=MODEL, parallelism=shape)
    two = simulate(documents, following=[documents], cluster=cluster(2), model=MODEL, parallelism=shape)
    assert "wlb-no-delay" not in [result.strategy for result in one]
    assert "wlb-no-delay" in [result.strategy for result in two]
    with pytest.raises(distca.InvalidArgumentError, match="micro-batch 0 has documents of 1 ranks"):
        simulate(documents, following=[[[[1]]]], cluster=cluster(2), model=MODEL, parallelism=shape)
