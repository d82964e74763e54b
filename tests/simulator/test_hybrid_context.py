"""Megatron's hybrid context parallelism: its schedule by hand and beside Megatron's own, and its groups."""

from __future__ import annotations

import importlib.util
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import simulate
from distca.simulator.strategies.hybrid_context import layout_of, rings_of
from distca.simulator.strategies.hybrid_schedule import Group, ranks_needed, schedule
from support.simulated import MODEL, cluster


def _summary(rounds: list[list[Group]]) -> list[list[tuple[int, list[int]]]]:
    return [[(group.size, group.documents) for group in of_round] for of_round in rounds]


def test_a_document_needs_a_power_of_two_of_ranks() -> None:
    assert [ranks_needed(n, 100) for n in (1, 100, 101, 200, 201, 400, 401, 800, 801)] == [1, 1, 2, 2, 4, 4, 8, 8, 16]


def test_a_round_by_hand() -> None:
    # Loads: 8^2 / 2 = 32, 16, 16, 4, 4. The 8 takes ranks 0 and 1, the 4s take one each, and each gets a 2.
    assert _summary(schedule([8, 4, 4, 2, 2], 4, most_tokens=4)) == [[(2, [0]), (1, [1, 3]), (1, [2, 4])]]


def test_groups_grow_until_no_rank_is_idle_by_hand() -> None:
    # Two documents that need one rank each: the first group takes two ranks, and then the second.
    assert _summary(schedule([4, 2], 4, most_tokens=4)) == [[(2, [0]), (2, [1])]]


def test_a_document_is_left_for_the_next_round_by_hand() -> None:
    # Loads 36, 25 and 25 on two ranks: 36 and 25, then 50 and 36, whose slack is 14 of 50. Without the last document
    # it is 11, and that one is the next round, on both ranks.
    assert _summary(schedule([6, 5, 5], 2, most_tokens=6)) == [[(1, [0]), (1, [1])], [(2, [2])]]


lengths = st.lists(st.integers(1, 800), min_size=1, max_size=30)


@given(lengths, st.sampled_from([1, 2, 4, 8]))
def test_every_document_is_computed_once_by_a_group_that_can_hold_it(lengths: list[int], ranks: int) -> None:
    most = -(-max(lengths) // ranks)
    rounds = schedule(lengths, ranks, most)
    assert sorted(n for of in rounds for group in of for n in group.documents) == list(range(len(lengths)))
    for groups in rounds:
        assert sum(group.size for group in groups) == ranks
        for group in groups:
            assert group.size & (group.size - 1) == 0 and group.documents
            assert all(lengths[n] <= most * group.size for n in group.documents)
        layout = layout_of(groups, lengths)
        assert sum(layout.document_lengths) == sum(lengths[n] for group in groups for n in group.documents)
        for ring, group in zip(rings_of(groups), groups, strict=True):
            rows = sum(layout.num_rows(home) for home in ring)
            assert rows == sum(lengths[n] for n in group.documents)


class _Ranks:
    """As much of a process group as Megatron's scheduler asks for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_schedule_is_that_of_megatron() -> None:
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    generator = random.Random(0)
    for _ in range(300):
        ranks = generator.choice([2, 4, 8, 16])
        lengths = [max(1, int(2 ** generator.uniform(0, 12))) for _ in range(generator.randint(1, 40))]
        most = -(-max(lengths) // generator.choice([1, 2, ranks]))
        theirs = BalancedCPScheduler(most, _Ranks(ranks))
        _, rounds = theirs.get_groups_and_subsamples(list(enumerate(lengths)), None)
        ours = [
            [group.documents for group in groups for _ in range(group.size)]
            for groups in schedule(lengths, ranks, most)
        ]
        assert ours == rounds, (ranks, most, lengths)


def test_hybrid_context_needs_a_power_of_two_and_no_pipeline() -> None:
    for shape in (Parallelism(data=3), Parallelism(data=2, pipeline=2)):
        with pytest.raises(distca.InvalidArgumentError, match="a power of two and no pipeline"):
            simulate(
                [[[100]] * shape.homes],
                cluster=cluster(shape.homes * shape.pipeline),
                model=MODEL,
                parallelism=shape,
                strategies=["hybrid-context"],
            )


def test_short_documents_travel_no_more() -> None:
    # Context parallelism of 4 for a long document. The short ones stay on one rank each, and only its keys travel.
    shape, documents = Parallelism(data=2, context=4), [[[32000], *[[4000] * 8] * 7]]
    ring, hybrid = simulate(
        documents,
        cluster=cluster(8),
        model=MODEL,
        parallelism=shape,
        strategies=["ring", "hybrid-context"],
    )
    assert hybrid.bytes_inside < ring.bytes_inside
