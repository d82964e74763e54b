"""Layouts: which rows live on which rank, and which layouts are refused."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distca

HUGE = 2**40


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 6), st.integers(0, 20))
def test_packed_rows_in_rank_order_are_all_rows_of_all_documents_in_order(
    lengths: list[int], ranks: int, spare: int
) -> None:
    tokens_per_rank = -(-sum(lengths) // ranks) + spare + 1
    layout = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)
    rows = [
        (document, row)
        for rank in range(ranks)
        for document, begin, end in layout.segments(rank)
        for row in range(begin, end)
    ]
    assert rows == [(document, row) for document, length in enumerate(lengths) for row in range(length)]
    full = sum(lengths) // tokens_per_rank
    counts = [tokens_per_rank] * full + [sum(lengths) % tokens_per_rank] + [0] * ranks
    assert [layout.num_rows(rank) for rank in range(ranks)] == counts[:ranks]
    assert layout.document_lengths == lengths
    assert layout.num_ranks == ranks


@settings(max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 6), st.integers(0, 40))
def test_documents_that_are_not_long_fill_the_ranks_whole_but_for_one_at_each_border(
    lengths: list[int], ranks: int, longer_than: int
) -> None:
    layout = distca.Layout.head_tail(lengths, ranks=ranks, longer_than=longer_than)  # has every row once, or raises
    assert layout.document_lengths == lengths
    long = [document for document, length in enumerate(lengths) if length > longer_than]
    cut = distca.Layout.head_tail([lengths[document] for document in long], ranks=ranks) if long else None
    pieces = 0
    for rank in range(ranks):
        assert abs(layout.num_rows(rank) - sum(lengths) / ranks) <= len(long) + 1
        segments = layout.segments(rank)
        if cut is not None:
            assert segments[: len(cut.segments(rank))] == [(long[d], b, e) for d, b, e in cut.segments(rank)]
        pieces += sum(document not in long for document, _, _ in segments)
    assert pieces - (len(lengths) - len(long)) <= ranks - 1


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 40),
)
def test_groups_of_ranks_share_the_rows_in_order_and_each_cuts_its_own(
    lengths: list[int], ranks: int, context: int, longer_than: int
) -> None:
    context = min(context, ranks)
    lengths = [*lengths, ranks - sum(lengths) % ranks]  # so that ranks have equal rows, to the row
    tokens_per_rank = sum(lengths) // ranks
    layout = distca.Layout.head_tail(lengths, ranks=ranks, longer_than=longer_than, context=context)
    by_rank = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)
    for first in range(0, ranks, context):
        group = range(first, min(first + context, ranks))
        pieces: list[tuple[int, int, int]] = []  # the rows of the group, in one piece for each document
        for document, begin, end in itertools.chain.from_iterable(map(by_rank.segments, group)):
            if pieces and pieces[-1][0] == document:
                begin = pieces.pop()[1]
            pieces.append((document, begin, end))
        cut = distca.Layout.head_tail([e - b for _, b, e in pieces], ranks=len(group), longer_than=longer_than)
        for rank in group:
            expected = [(pieces[n][0], pieces[n][1] + b, pieces[n][1] + e) for n, b, e in cut.segments(rank - first)]
            assert layout.segments(rank) == expected


@settings(max_examples=200)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=20), st.integers(1, 12))
def test_spread_gives_equal_rows_and_long_documents_as_many_homes_as_their_keys_leave_for(
    lengths: list[int], ranks: int
) -> None:
    layout, total = distca.Layout.spread(lengths, ranks=ranks), sum(lengths)
    assert layout.document_lengths == lengths
    quotas = [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]
    assert [layout.num_rows(rank) for rank in range(ranks)] == quotas
    whole = 0
    for document, length in enumerate(lengths):
        parts = [[(b, e) for d, b, e in layout.segments(rank) if d == document] for rank in range(ranks)]
        share = Fraction(length**3 * ranks, sum(n**3 for n in lengths))
        homes = min(ranks, math.ceil(share))
        cut = [length * chunk // (2 * homes) for chunk in range(2 * homes + 1)]
        ends = [[(cut[i], cut[i + 1]), (cut[-i - 2], cut[-i - 1])] for i in range(homes)]
        spread = [[] for _ in range(ranks)]
        fits = False
        for first in range(ranks):
            for i in range(ranks):
                spread[(first + i) % ranks] = [part for part in ends[i] if part[0] < part[1]] if i < homes else []
            fits = fits or parts == spread
        if homes < 1.5 * math.ceil(Fraction(length * ranks, total)) or not fits:  # no room: it fills ranks in order
            whole += 1
            held = [part for of_rank in parts for part in of_rank]
            assert held == sorted(held)
            assert all(len(of_rank) <= 1 for of_rank in parts)
    assert sum(len(layout.segments(rank)) for rank in range(ranks)) <= whole + ranks - 1 + 4 * ranks


def test_spread_puts_both_ends_of_a_long_document_on_many_ranks() -> None:
    layout = distca.Layout.spread([100] * 60 + [3000] + [100] * 70, ranks=20)  # 800 rows a rank
    cut = [150 * i // 2 for i in range(41)]  # 3000 ** 3 is 0.995 of all cubes: all ranks
    for rank in range(20):
        assert layout.num_rows(rank) == 800
        parts = [(begin, end) for document, begin, end in layout.segments(rank) if document == 60]
        assert parts == [(cut[rank], cut[rank + 1]), (cut[39 - rank], cut[40 - rank])]


def test_spread_leaves_documents_of_equal_length_as_packed() -> None:
    for lengths, ranks, rows in (([256] * 16, 32, 128), ([128] * 32, 32, 128), ([64] * 64, 32, 128)):
        spread = distca.Layout.spread(lengths, ranks=ranks)
        packed = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=rows)
        assert [spread.segments(rank) for rank in range(ranks)] == [packed.segments(rank) for rank in range(ranks)]


def test_spread_puts_the_next_long_document_beside_the_first() -> None:
    layout = distca.Layout.spread([1000, 1000, *[10] * 600], ranks=16)  # half of all cubes each: 8 ranks of 500 rows
    homes = [
        [rank for rank in range(16) if document in {d for d, _, _ in layout.segments(rank)}] for document in (0, 1)
    ]
    assert homes == [[*range(8)], [*range(8, 16)]]


@pytest.mark.parametrize(("lengths", "ranks"), [([0], 2), ([3.5], 2), (5, 2), ([3], 0), ([3], "2")])
def test_wrong_numbers_cannot_be_spread(lengths: object, ranks: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="layout: "):
        distca.Layout.spread(lengths, ranks=ranks)  # type: ignore[arg-type]


def test_many_ranks_may_share_documents_in_groups() -> None:
    lengths = [1 << 16] * 512
    layout = distca.Layout.head_tail(lengths, ranks=512, context=8)
    made = distca.plan(layout, distca.Heads(q=32, kv=8, dim=128), ranks_per_node=8)
    assert made.stats.imbalance_after <= 1.05
    assert sum(made.stats.bytes_between_nodes.values()) == 0  # documents and their keys stay in a node


@pytest.mark.parametrize("context", [0, -1, 3, "2", 1.0, True])
def test_a_wrong_number_of_ranks_that_share_a_document_is_refused(context: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="layout: context = "):
        distca.Layout.head_tail([8], ranks=2, context=context)  # type: ignore[arg-type]


@pytest.mark.parametrize("longer_than", [-1, "4", True, 1.5])
def test_a_wrong_length_from_which_documents_are_long_is_refused(longer_than: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="layout: longer_than is .*; 0 to .* tokens are allowed"):
        distca.Layout.head_tail([8], ranks=2, longer_than=longer_than)


def test_a_document_that_does_not_fit_goes_on_on_the_next_ranks() -> None:
    layout = distca.Layout.packed([3, 9, 1], ranks=4, tokens_per_rank=4)
    assert [layout.segments(rank) for rank in range(4)] == [
        [(0, 0, 3), (1, 0, 1)],
        [(1, 1, 5)],
        [(1, 5, 9)],
        [(2, 0, 1)],
    ]


def test_whole_documents_are_numbered_over_the_ranks_in_order() -> None:
    layout = distca.Layout.from_documents([[3, 1], [], [5]])
    assert [layout.segments(rank) for rank in range(3)] == [[(0, 0, 3), (1, 0, 1)], [], [(2, 0, 5)]]
    assert layout.document_lengths == [3, 1, 5]


def test_position_ids_count_from_the_start_of_the_document_and_are_0_for_padding() -> None:
    layout = distca.Layout([[(0, 4, 6), (-1, 0, 2), (1, 0, 3)], [], [(0, 0, 4), (-1, 0, 1)]])
    expected = [[4, 5, 0, 0, 0, 1, 2], [], [0, 1, 2, 3, 0]]
    for rank, positions in enumerate(expected):
        ids = layout.position_ids(rank)
        assert ids.dtype == torch.int64
        assert ids.tolist() == positions
        assert layout.num_rows(rank) == len(positions)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], ["0 ranks"]),
        ([[(0, 0, 3), (0, 4, 6)]], ["document 0", "[3, 4)", "on no rank"]),
        ([[(0, 1, 3)]], ["document 0", "[0, 1)", "on no rank"]),
        ([[(0, 0, 3)], [(0, 2, 6)]], ["document 0", "[2, 3)", "given twice", "rank 1"]),
        ([[(0, 0, 3)], [(0, 0, 3)]], ["document 0", "given twice"]),
        ([[(0, 0, 3), (2, 0, 3)]], ["document 1", "missing"]),
        ([[(1, 0, 3)]], ["document 0", "missing"]),
        ([[(-2, 0, 3)]], ["-2", "negative"]),
        ([[(0, -1, 3)]], ["document 0", "[-1, 3)"]),
        ([[(0, 3, 3)]], ["document 0", "[3, 3)"]),
        ([[(0, 3, 1)]], ["document 0", "[3, 1)"]),
        ([[(-1, 0, 0)]], ["[0, 0)"]),
        ([[(0, 0, HUGE)]], [str(HUGE)]),
        ([[(0, 0, 2**31), (1, 0, 1)]], ["rank 0", str(2**31)]),
    ],
    ids=str,
)
def test_segments_that_do_not_cover_documents_exactly_once_are_refused(
    ranks: list[list[tuple[int, int, int]]], said: list[str]
) -> None:
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.Layout(ranks)
    for words in said:
        assert words in str(caught.value)


def test_cumulative_lengths_are_called_so() -> None:
    cumulative = torch.tensor([0, 5, 9], dtype=torch.int32)
    for make in (
        lambda lengths: distca.Layout.from_documents([[3], lengths]),
        lambda lengths: distca.Layout.packed(lengths, ranks=2, tokens_per_rank=10),
        lambda lengths: distca.Layout.head_tail(lengths, ranks=2),
        lambda lengths: distca.Layout.spread(lengths, ranks=2),
    ):
        for lengths in (cumulative, cumulative.tolist()):
            with pytest.raises(distca.InvalidArgumentError, match=r"length 0; these look like cumulative .*cu_seqlens"):
                make(lengths)
        with pytest.raises(distca.InvalidArgumentError, match="has length 0; 1 to"):
            make([0, 5, 4])
        assert make(cumulative.diff()).document_lengths[-2:] == [5, 4]


@pytest.mark.parametrize("length", [0, -3, HUGE])
def test_impossible_document_lengths_are_refused_with_the_document_and_the_length(length: int) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=rf"document 1 .*length {length};"):
        distca.Layout.packed([2, length], ranks=2, tokens_per_rank=8)
    with pytest.raises(distca.InvalidArgumentError, match=rf"document 1 on rank 1 .*length {length};"):
        distca.Layout.from_documents([[2], [length]])


@pytest.mark.parametrize("length", [2**63, -(2**63) - 1, 2**200])
def test_numbers_beyond_64_bits_are_refused(length: int) -> None:
    with pytest.raises((distca.InvalidArgumentError, TypeError, OverflowError)):
        distca.Layout.packed([length], ranks=1, tokens_per_rank=8)
    with pytest.raises((distca.InvalidArgumentError, TypeError, OverflowError)):
        distca.Layout([[(0, 0, length)]])


def test_documents_that_do_not_fit_are_refused_with_the_document_and_the_room() -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"document 1 \(6 rows\) does not fit: 2 ranks of 4 rows"):
        distca.Layout.packed([3, 6], ranks=2, tokens_per_rank=4)
    distca.Layout.packed([3, 5], ranks=2, tokens_per_rank=4)


@pytest.mark.parametrize(("ranks", "tokens"), [(0, 8), (-1, 8), (2**40, 8), (2, 0), (2, -1), (2, HUGE)])
def test_impossible_rank_and_token_counts_are_refused(ranks: int, tokens: int) -> None:
    wrong = ranks if tokens == 8 else tokens
    with pytest.raises(distca.InvalidArgumentError, match=rf"= {wrong};"):
        distca.Layout.packed([1], ranks=ranks, tokens_per_rank=tokens)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank: int) -> None:
    layout = distca.Layout.from_documents([[3], [2]])
    for ask in (layout.num_rows, layout.segments, layout.position_ids):
        with pytest.raises(distca.InvalidArgumentError, match=rf"rank = {rank}; 0 to 1"):
            ask(rank)


@pytest.mark.parametrize("length", [2**70, 1.5, float("nan"), "8", None], ids=str)
def test_lengths_that_are_no_row_numbers_are_named(length: object) -> None:
    lengths = [8, length]
    said = "has length " + re.escape(repr(length)) + "; integers from 1 to 2147483648 are allowed"
    with pytest.raises(distca.InvalidArgumentError, match="document 2 on rank 1 " + said):
        distca.Layout.from_documents([[3], lengths])  # type: ignore[list-item]
    with pytest.raises(distca.InvalidArgumentError, match="document 1 " + said):
        distca.Layout.packed(lengths, ranks=2, tokens_per_rank=8)  # type: ignore[arg-type]
    with pytest.raises(distca.InvalidArgumentError, match="document 1 " + said):
        distca.Layout.head_tail(lengths, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(distca.InvalidArgumentError, match=r"rank 1, segment 0 is \(1, 0, "):
        distca.Layout([[(0, 0, 8)], [(1, 0, length)]])  # type: ignore[list-item]
