"""The rows in front of each piece of a document, whichever rank has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.connect.row_exchange import ThreadRows
from distca.planner.halos import halos
from support.branches import random_tree, rows_of, rows_on
from support.groups import on_threads


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 70), st.booleans())
def test_each_row_has_those_before_it_in_its_document_in_front_of_it(
    seed: int, ranks: int, width: int, merges: bool
) -> None:
    tree = random_tree(seed, merges=merges)
    layout = tree.layout(ranks, seed)
    paths = [rows_of(tree, document) for document in range(len(tree.lengths))]

    def work(rank: int, exchange: ThreadRows) -> None:
        around = halos(layout, rank, width)
        own = rows_on(layout, rank)
        rows = torch.tensor([(document + 1, row + 1) for document, row in own], dtype=torch.int32).reshape(-1, 2)
        padded = around.pad(rows, exchange).tolist()
        assert len(around.own) == len(own)
        for (document, row), at in zip(own, around.own.tolist(), strict=True):
            if document == distca.PADDING:
                assert padded[at] == [document + 1, row + 1]
                continue
            before = paths[document][max(0, row - width) : row]
            first = at - min(width, row)  # of the rows of this document
            assert padded[first : at + 1] == [[d + 1, r + 1] for d, r in before] + [[document + 1, row + 1]]
            if row < width:
                assert padded[at - width : first] == [[0, 0]] * (width - row)

    on_threads(ranks, work)


def test_rows_move_only_where_documents_are_cut() -> None:
    whole = distca.Layout([[(0, 0, 9), (-1, 0, 2), (1, 0, 3)], [(2, 0, 4)]])
    cut = distca.Layout([[(0, 0, 9)], [(0, 9, 12)], [(1, 0, 5)]])
    assert not any(halos(whole, rank, 3).is_moved for rank in range(2))
    assert all(halos(cut, rank, 3).is_moved for rank in range(3))
    assert not any(halos(cut, rank, 0).is_moved for rank in range(3))
    assert [halos(cut, rank, 3).num_leave for rank in range(3)] == [[0, 3, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_padded_pieces_is_that_of_whole_documents(bias: bool) -> None:
    layout = distca.Layout([[(0, 5, 8), (1, 0, 2)], [(-1, 0, 2), (0, 0, 5)]])
    torch.manual_seed(0)
    convolve = torch.nn.Conv1d(3, 3, 4, groups=3, bias=bias, dtype=torch.float64)
    documents = [torch.randn(length, 3, dtype=torch.float64) for length in (8, 2)]
    weights = [torch.randn_like(rows) for rows in documents]

    def causal(rows: torch.Tensor) -> torch.Tensor:
        return convolve(torch.cat([rows.new_zeros(3, 3), rows]).T[None])[0].T

    alone = [rows.clone().requires_grad_() for rows in documents]
    expected = [causal(rows) for rows in alone]
    sum((of * weight).sum() for of, weight in zip(expected, weights, strict=True)).backward()

    def work(rank: int, exchange: ThreadRows) -> None:
        own = rows_on(layout, rank)
        rows = torch.stack([documents[d][r] if d >= 0 else torch.ones(3, dtype=torch.float64) for d, r in own])
        rows.requires_grad_()
        around = halos(layout, rank, 3)
        found = convolve(around.pad(rows, exchange).T[None])[0].T
        found = found[around.own - 3]  # an unpadded convolution has no results of the first three rows
        is_real = torch.tensor([d >= 0 for d, _ in own])
        torch.testing.assert_close(found[is_real], torch.stack([expected[d][r] for d, r in own if d >= 0]))
        (found[is_real] * torch.stack([weights[d][r] for d, r in own if d >= 0])).sum().backward()
        torch.testing.assert_close(rows.grad[is_real], torch.stack([alone[d].grad[r] for d, r in own if d >= 0]))

    on_threads(2, work)
