"""Strategies that deal whole documents: what they keep, what bounds them, and examples by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distca.simulator.setup import Model
from distca.simulator.strategies.karmarkar_karp import deal, document_cost, partition
from support.simulated import MODEL

costs = st.lists(st.integers(0, 10**9), max_size=40)


def test_two_parts_by_hand() -> None:
    # 8 against 7, 6 against 5, and 4: differences 1, 1, 4. Then 4 + 7 against 8, difference 3; then 4 + 7 + 5 = 16
    # against 8 + 6 = 14. The best division is 15 and 15.
    assert partition([8, 7, 6, 5, 4], 2) == [[1, 3, 4], [0, 2]]


def test_three_parts_by_hand() -> None:
    # (9,0,0) and (8,0,0): (9,8,0), spread 9. Spreads are now 9 | 7, 5, 4. With (7,0,0): (9,8,7), spread 2.
    # (5,0,0) and (4,0,0): (5,4,0), spread 5. With (9,8,7): 9 + 0, 8 + 4, 7 + 5: sums 12, 12 and 9.
    parts = partition([9, 8, 7, 5, 4], 3)
    assert sorted(sum([9, 8, 7, 5, 4][i] for i in part) for part in parts) == [9, 12, 12]


@given(costs, st.integers(1, 9))
def test_parts_have_every_cost_once_and_differ_by_no_more_than_the_largest(costs: list[int], count: int) -> None:
    parts = partition(costs, count)
    assert len(parts) == count and sorted(index for part in parts for index in part) == list(range(len(costs)))
    sums = [sum(costs[index] for index in part) for part in parts]
    assert sums == sorted(sums, reverse=True)
    assert max(sums) - min(sums) <= max(costs, default=0)


def test_the_cost_of_a_document_by_hand() -> None:
    model = Model(layers=2, hidden=8, intermediate=16, vocabulary=10, q_heads=1, kv_heads=1, head_dim=8)
    # A layer has 8 x 8 x 4 weights of projections, 3 x 8 x 16 of the MLP and 2 x 8 of norms: 656. Logits have 80.
    # 100 tokens: 2 x (2 x 656 + 80) x 100 operations; attention 2 x 2 x 8 x 100^2.
    assert document_cost(100, model) == 278_400 + 320_000


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_documents_are_dealt_to_ranks_and_then_to_micro_batches(lengths: list[int]) -> None:
    dealt = deal([[lengths, [], []], [[], [], []]], MODEL)
    assert [len(micro_batch) for micro_batch in dealt] == [3, 3]
    assert sorted(n for micro_batch in dealt for of_home in micro_batch for n in of_home) == sorted(lengths)

    def cost(documents: list[int]) -> int:
        return sum(document_cost(n, MODEL) for n in documents)

    largest = max(map(cost, ([n] for n in lengths)))
    of_ranks = [cost(dealt[0][home] + dealt[1][home]) for home in range(3)]
    assert max(of_ranks) - min(of_ranks) <= largest
    assert all(0 <= cost(dealt[0][home]) - cost(dealt[1][home]) <= largest for home in range(3))
