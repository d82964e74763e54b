"""Documents that are cut, or that share rows, are whole on one rank each, and their rows find back."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.connect.row_exchange import GroupRows, Meeting, ThreadRows
from distca.planner.gathering import gathering
from support.branches import random_tree, rows_of, rows_on
from support.groups import on_threads


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_each_document_is_whole_on_one_rank_and_its_own_rows_come_back(seed: int, ranks: int, merges: bool) -> None:
    tree = random_tree(seed, merges=merges)
    layout = tree.layout(ranks, seed)

    def work(rank: int, exchange: ThreadRows) -> tuple[list[list[tuple[int, int]]], torch.Tensor]:
        gathered = gathering(layout, rank)
        rows = torch.tensor(rows_on(layout, rank), dtype=torch.int32).reshape(-1, 2)
        if gathered is None:
            assert not tree.branches
            return [], rows
        whole = gathered.gather(rows, exchange)
        of_documents = [[tuple(row) for row in of.tolist()] for of in whole.split(gathered.lengths)]
        # What a row becomes depends on the document in which it is computed.
        firsts = torch.cat([of[-1:].expand(len(of), 2) for of in whole.split(gathered.lengths)])
        return of_documents, torch.cat([gathered.scatter(whole, exchange), gathered.scatter(firsts, exchange)], dim=1)

    results = on_threads(ranks, work)
    found = [of for of_documents, _ in results for of in of_documents if of[0][0] >= 0]
    for rank, (of_documents, back) in enumerate(results):
        if not of_documents:
            continue
        own = rows_on(layout, rank)
        assert back[:, :2].tolist() == [list(row) for row in own]
        # A row comes back from its own document, which ends with that document's last row, and not from a branch.
        ends = [(document, tree.lengths[document] - 1) for document, _ in own if document >= 0]
        assert [row for row in back[:, 2:].tolist() if row[0] >= 0] == [list(end) for end in ends]
    if found:
        expected = [rows_of(tree, document) for document in range(len(tree.lengths))]
        assert sorted(of for of in found if of in expected) == sorted(expected)
        assert all(len(of) == 1 for of in found if of not in expected)  # a rank without documents runs on one row


def test_documents_that_are_whole_stay() -> None:
    layout = distca.Layout([[(0, 0, 9), (1, 0, 12), (1, 12, 20), (-1, 0, 2)], [(2, 0, 40)]])
    assert gathering(layout, 0) is gathering(layout, 1) is None


def test_a_document_goes_where_the_fewest_rows_are() -> None:
    layout = distca.Layout([[(0, 0, 30), (1, 0, 10)], [(1, 10, 40)], [(1, 40, 50), (2, 0, 2)]])
    assert [gathering(layout, rank).lengths for rank in range(3)] == [[30], [50], [2]]
    packed = distca.Layout.packed([40] * 7, ranks=4, tokens_per_rank=70)
    of_ranks = [sum(gathering(packed, rank).lengths) for rank in range(4)]
    assert sorted(of_ranks) == [40, 80, 80, 80]


def test_pieces_of_a_document_on_one_rank_need_no_other_rank() -> None:
    layout = distca.Layout([[(0, 5, 8), (0, 0, 5), (-1, 0, 1)], [(1, 0, 3)]])
    gathered = gathering(layout, 0)
    assert gathered is not None and not gathered.is_moved
    rows = torch.tensor([5, 6, 7, 0, 1, 2, 3, 4, -1])
    assert gathered.gather(rows, None).tolist() == [*range(8), -1]
    assert torch.equal(gathered.scatter(gathered.gather(rows, None), None), rows)


def test_a_rank_without_rows_computes_a_row_of_zeros() -> None:
    layout = distca.Layout([[(0, 0, 3)], [(0, 3, 8)], []])

    def work(rank: int, exchange: ThreadRows) -> list[float]:
        gathered = gathering(layout, rank)
        rows = torch.full((layout.num_rows(rank), 2), float(rank + 1))
        whole = gathered.gather(rows, exchange)
        assert torch.equal(gathered.scatter(whole, exchange), rows)
        return whole[:, 0].tolist()

    assert on_threads(3, work) == [[1.0], [1.0] * 3 + [2.0] * 5, [0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_shared_rows_are_sums_over_the_documents_that_see_them(dtype: torch.dtype) -> None:
    layout = distca.Layout([[(0, 0, 4), (1, 4, 6)], [(2, 4, 7)]], branches={1: 0, 2: 0})

    def work(rank: int, exchange: ThreadRows) -> torch.Tensor:
        rows = torch.ones(layout.num_rows(rank), 1, dtype=dtype, requires_grad=True)
        gathered = gathering(layout, rank)
        sums = [
            of.sum(dim=0, keepdim=True).expand(len(of), 1)
            for of in gathered.gather(rows, exchange).split(gathered.lengths)
        ]
        gathered.scatter(torch.cat(sums), exchange).sum().backward()
        return rows.grad[:, 0].tolist()

    # A document's sum counts once for each of its own rows: 4, 2 and 3 times.
    assert on_threads(2, work) == [[4.0 + 2 + 3] * 4 + [2.0] * 2, [3.0] * 3]


def test_an_exchange_to_which_a_rank_does_not_come_is_an_error() -> None:
    meeting = Meeting(2)
    exchange = ThreadRows(meeting, 0, 0.05)
    with pytest.raises(distca.PeerTimeoutError, match="could not exchange rows: one of them did not come"):
        exchange.move(torch.zeros(2, 3), [1, 1], [1, 1])


def test_rows_that_were_exchanged_are_not_kept() -> None:
    meeting = Meeting(2)
    threads = [
        threading.Thread(target=ThreadRows(meeting, rank, 20.0).move, args=(torch.zeros(2, 3), [1, 1], [1, 1]))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meeting.sent == [[], []]


def test_a_lack_of_memory_for_rows_is_not_taken_for_the_end_of_a_rank() -> None:
    exchange = GroupRows.__new__(GroupRows)  # of no process group
    with pytest.raises(RuntimeError) as error:
        exchange.bytes_of_all(torch.zeros(1, 1, dtype=torch.uint8), [1], [2**60])
    assert not isinstance(error.value, distca.DistcaError)


@pytest.mark.parametrize("of_row", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_rows_of_any_dtype_and_shape_are_exchanged(dtype: torch.dtype, of_row: tuple[int, ...]) -> None:
    """Rank 0 sends three rows to rank 1, which keeps its own three."""

    def work(rank: int, exchange: ThreadRows) -> torch.Tensor:
        rows = torch.full((*reversed(of_row), 3), rank, dtype=dtype).permute(*reversed(range(len(of_row) + 1)))
        return exchange.move(rows, [0, 3], [3 * rank, 3 * rank])

    expected = torch.tensor([0, 0, 0, 1, 1, 1], dtype=dtype).reshape(6, *[1] * len(of_row)).expand(6, *of_row)
    nothing, all_rows = on_threads(2, work)
    assert torch.equal(all_rows, expected)
    assert nothing.shape == (0, *of_row) and nothing.dtype == dtype
