"""Documents that are cut between ranks are computed by all of them, each for some heads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.planner.head_split import head_split, heads_of_rank
from support.branches import random_tree, rows_of


def _paths(layout: distca.Layout, documents: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """For each document the place, as (rank, number), of each row that it sees."""
    places = {}
    for rank in range(layout.num_ranks):
        rows = [(d, row) for d, begin, end in layout.segments(rank) for row in range(begin, end)]
        places |= {row: (rank, number) for number, row in enumerate(rows) if row[0] >= 0}
    return [[places[row] for row in rows] for rows in documents]


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_rows_of_each_document_are_together_and_results_find_back(seed: int, ranks: int, merges: bool) -> None:
    tree = random_tree(seed, merges=merges)
    layout = tree.layout(ranks, seed)
    paths = _paths(layout, [rows_of(tree, document) for document in range(len(tree.lengths))])
    is_cut = [len({rank for rank, _ in path}) > 1 for path in paths]
    splits = [head_split(layout, rank) for rank in range(ranks)]

    # What comes to any rank: the rows that leave each, by rank.
    came = [(rank, number) for rank, split in enumerate(splits) for number in split.leave.tolist()]
    assert len(set(came)) == len(came)
    cut = [[came[at] for at in part.tolist()] for part in splits[0].take.split(splits[0].cut.lengths)]
    assert cut == [path for path, of in zip(paths, is_cut, strict=True) if of]
    results = [(document, place) for document, path in enumerate(paths) if is_cut[document] for place in path]
    given = [part.tolist() for part in splits[0].give.split(splits[0].num_give)]
    for rank, split in enumerate(splits):
        assert split.is_moved == any(is_cut)
        assert split.num_come == [len(of.leave) for of in splits]
        assert [part.tolist() for part in split.give.split(split.num_give)] == given
        num_rows = layout.num_rows(rank)
        here = range(num_rows) if split.whole_rows is None else split.whole_rows.tolist()
        assert len(here) == sum(split.whole.lengths)
        # Each row's result is that of its own document, of whole documents first.
        whole = [None] * len(here)
        begin = 0
        for length in split.whole.lengths:
            rows = [(rank, number) for number in here[begin : begin + length]]
            document = paths.index(rows) if rows in paths else distca.PADDING
            whole[begin : begin + length] = [(document, place) for place in rows]
            begin += length
        have = whole + [results[at] for at in given[rank]]
        own = [document for document, begin, end in layout.segments(rank) for _ in range(begin, end)]
        assert [have[at] for at in split.place.tolist()] == [
            (document, (rank, number)) for number, document in enumerate(own)
        ]


def test_rows_as_they_lie_are_not_copied() -> None:
    layout = distca.Layout([[(0, 0, 9), (-1, 0, 2), (1, 0, 3)], [(2, 3, 5), (2, 0, 3)]])
    first, second = head_split(layout, 0), head_split(layout, 1)
    assert first.whole_rows is None and first.whole.lengths == [9, 2, 3] and not first.is_moved
    assert first.whole.cu_seqlens.tolist() == [0, 9, 11, 14]
    assert second.whole_rows.tolist() == [2, 3, 4, 0, 1] and not second.is_moved


@pytest.mark.parametrize("num_heads", [1, 2, 7, 8, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_head_is_computed_once_and_ranks_have_equally_many(num_heads: int, num_ranks: int) -> None:
    of_ranks = [heads_of_rank(num_heads, rank, num_ranks) for rank in range(num_ranks)]
    assert [head for heads in of_ranks for head in heads] == [*range(num_heads)]
    assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1
