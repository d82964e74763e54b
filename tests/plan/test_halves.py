"""The two halves of a micro-batch for ping-pong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from support.batches import LAYOUTS, examples


def _pairs(layout: distca.Layout, window: int | None = None) -> int:
    return sum(min(row + 1, window or length) for length in layout.document_lengths for row in range(length))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    ranks=st.integers(1, 4),
    name=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 99),
)
@examples(100)
def test_every_document_is_whole_in_one_half_with_the_rows_of_its_rank(
    lengths: list[int], ranks: int, name: str, seed: int
) -> None:
    whole = LAYOUTS[name](lengths, ranks, seed)
    both = distca.halves(whole)
    assert sorted(both[0].documents + both[1].documents) == list(range(len(lengths)))
    for rank in range(ranks):
        position, document_of = [], []
        for document, begin, end in whole.segments(rank):
            position += range(begin, end)
            document_of += [document] * (end - begin)
        taken = torch.cat([half.rows(rank) for half in both]).tolist()
        assert sorted(taken) == [row for row, document in enumerate(document_of) if document != distca.PADDING]
        for half in both:
            expected = [(half.documents[d], row) for d, b, e in half.layout.segments(rank) for row in range(b, e)]
            assert [(document_of[row], position[row]) for row in half.rows(rank).tolist()] == expected
    assert [half.layout.document_lengths for half in both] == [[lengths[d] for d in half.documents] for half in both]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), window=st.sampled_from([None, 7]))
@examples(50)
def test_on_one_rank_neither_half_has_more_than_the_other_and_the_costliest_document(
    lengths: list[int], window: int | None
) -> None:
    both = distca.halves(distca.Layout.from_documents([lengths]), window=window)
    pairs, tokens = [_pairs(half.layout, window) for half in both], [half.layout.num_rows(0) for half in both]
    most = max(_pairs(distca.Layout.from_documents([[n]]), window) for n in lengths)
    difference = abs(pairs[0] - pairs[1]) / sum(pairs), abs(tokens[0] - tokens[1]) / sum(tokens)
    assert sum(d * d for d in difference) <= 2 * max(most / sum(pairs), max(lengths) / sum(tokens)) ** 2 + 1e-9


def test_equal_documents_on_every_rank_are_dealt_out_evenly() -> None:
    both = distca.halves(distca.Layout.from_documents([[30] * 6, [10] * 18, [20] * 2]))
    assert [[half.layout.num_rows(rank) for rank in range(3)] for half in both] == [[90, 90, 20]] * 2


def test_tokens_and_attention_are_both_balanced_where_one_alone_would_not_be_enough() -> None:
    """A document of 80 balances two of 40 in tokens, but not in attention, so other documents must make up the
    difference.
    """
    both = distca.halves(distca.Layout.from_documents([[80, 50, 50, 40, 40, 20, 20, 10, 10, 10, 10]]))
    tokens = [half.layout.num_rows(0) for half in both]
    pairs = [_pairs(half.layout) for half in both]
    assert abs(tokens[0] - tokens[1]) <= 0.1 * sum(tokens)
    assert abs(pairs[0] - pairs[1]) <= 0.1 * sum(pairs)


@pytest.mark.parametrize("lengths", [[[]], [[], []], [[100], []]])
def test_a_half_may_be_empty(lengths: list[list[int]]) -> None:
    first, second = distca.halves(distca.Layout.from_documents(lengths))
    assert first.layout.num_rows(0) == sum(lengths[0]) and second.layout.num_rows(0) == 0


@pytest.mark.parametrize("options", [{"window": 0}, {"idle_rows": -1}, {"multiple_of": 0}], ids=str)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(distca.InvalidArgumentError, match=f"halves: {name} = "):
        distca.halves(distca.Layout.from_documents([[7, 5]]), **options)


def test_rows_of_a_half_are_padded_to_a_multiple() -> None:
    layout = distca.Layout.from_documents([[7, 5, 2], [9]])
    both = distca.halves(layout, idle_rows=1, multiple_of=4)
    for rank, of_whole in ((0, 14), (1, 9)):
        x = torch.arange(1, of_whole + 1)
        taken = [half.take(x, rank) for half in both]
        assert [len(rows) % 4 for rows in taken] == [0, 0] and all(len(rows) >= 4 for rows in taken)
        assert sorted(torch.cat(taken).tolist())[-of_whole:] == x.tolist()
        for half, rows in zip(both, taken, strict=True):
            own = len(half.rows(rank))
            assert len(rows) - own < 4 or not own
            assert half.layout.num_rows(rank) == len(rows) and not rows[own:].any()
            assert half.layout.segments(rank)[-1:] == [(distca.PADDING, 0, len(rows) - own)] * (len(rows) > own)
