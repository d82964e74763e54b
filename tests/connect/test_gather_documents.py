"""Layers of a user's own that look along rows get whole documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from support import ranks as processes
from support.groups import loopback_group, on_all_ranks, outcomes

HEADS = distca.Heads(1, 1, 8)
CUT = distca.Layout([[(0, 0, 4), (1, 0, 3)], [(1, 3, 9), (-1, 0, 2)], [(2, 0, 5), (1, 9, 10)]])
IN_PLACE = distca.Layout.from_documents([[4, 3], [9], [5]])
SHARED = distca.Layout([[(0, 0, 4), (1, 4, 6)], [(2, 4, 7)], [(3, 0, 2)]], branches={1: 0, 2: 0})


def _row(document: int, position: int) -> list[float]:
    return [float(10 * document + position), 1.0]


def _rows(layout: distca.Layout, rank: int) -> torch.Tensor:
    rows = [_row(document, position) for document, b, e in layout.segments(rank) for position in range(b, e)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def _sums(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """A recurrence over packed documents."""
    bounds = cu_seqlens.tolist()
    return torch.cat([rows[begin:end].cumsum(dim=0) for begin, end in zip(bounds, bounds[1:], strict=False)])


def _expected(layout: distca.Layout, rank: int) -> torch.Tensor:
    """For each row of the rank the sum over all rows of its document up to itself."""
    seen, own = dict(layout.branches), layout._own_rows()
    sums = []
    for document, begin, end in layout.segments(rank):
        before = [_row(of, p) for of, b, e in seen.get(document, []) for p in range(b, e)]
        first = 0 if document < 0 else own[document].start
        for position in range(begin, end):
            rows = before + [_row(document, p) for p in range(first, position + 1)]
            sums.append(torch.tensor(rows, dtype=torch.float64).sum(dim=0))
    return torch.stack(sums)


@pytest.mark.parametrize("layout", [CUT, IN_PLACE, SHARED], ids=["cut", "in place", "shared"])
def test_a_recurrence_sees_whole_documents_and_its_results_come_back(layout: distca.Layout) -> None:
    plan = distca.plan(layout, HEADS)

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        rows = _rows(layout, rank).requires_grad_()
        documents = distca.gather_documents(rows, plan.for_rank(rank), context=context)
        assert documents.cu_seqlens.dtype == torch.int32 and documents.cu_seqlens[-1] == len(documents.rows)
        results = documents.scatter(_sums(documents.rows, documents.cu_seqlens))
        results.sum().backward()
        # A row's gradient is the number of rows that its sums are in, among those that come back.
        assert (rows.grad[:, 0] >= 1).all() and torch.equal(rows.grad[:, 0], rows.grad[:, 1])
        return results.detach()

    with loopback_group(plan, timeout=20.0) as contexts:
        for rank, found in enumerate(on_all_ranks(contexts, work)):
            assert torch.equal(found, _expected(layout, rank)), rank


def test_documents_that_are_whole_are_the_same_tensor_and_need_no_context() -> None:
    rows = _rows(IN_PLACE, 0)
    documents = distca.gather_documents(rows, distca.plan(IN_PLACE, HEADS), context="none of this name")
    assert documents.rows is rows and documents.lengths == [4, 3] and documents.cu_seqlens.tolist() == [0, 4, 7]
    assert documents.scatter(rows) is rows


def test_plans_of_several_windows_have_one_layout() -> None:
    made = distca.plans(IN_PLACE, HEADS, windows=[None, 2], rank=1)
    assert distca.gather_documents(_rows(IN_PLACE, 1), made).lengths == [9]


def _on_a_rank() -> list[list[list[float]]]:
    rank = dist.get_rank()
    found = []
    with distca.init(max_tokens=16, heads=HEADS, timeout=60.0) as context:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows = _rows(CUT, rank).to(dtype)
            documents = distca.gather_documents(rows, distca.plan(CUT, HEADS, rank=rank, context=context))
            found.append(documents.scatter(_sums(documents.rows.double(), documents.cu_seqlens)).tolist())
    return found


def test_processes_exchange_rows_of_any_dtype() -> None:
    for rank, found in enumerate(processes.launch(_on_a_rank, ranks=3)):
        assert found == [_expected(CUT, rank).tolist()] * 3


def _leaves_early() -> str:
    rank = dist.get_rank()
    with distca.init(max_tokens=16, heads=HEADS, timeout=60.0) as context:
        plan = distca.plan(CUT, HEADS, rank=rank, context=context)
        distca.gather_documents(_rows(CUT, rank), plan)
        if rank == 1:
            return ""
        try:
            distca.gather_documents(_rows(CUT, rank), plan)
        except distca.DistcaError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_has_ended_is_an_error_on_the_others() -> None:
    first, _, third = processes.launch(_leaves_early, ranks=3)
    for found in (first, third):
        assert found.startswith("PeerDiedError: the ranks could not exchange rows: one of them has ended"), found


@pytest.mark.parametrize(
    ("rows", "plan", "message"),
    [
        (torch.zeros(6, 2), distca.plan(CUT, HEADS), r"rows have shape \[6, 2\], and the plan has 7 rows on rank 0"),
        (torch.tensor(1.0), distca.plan(CUT, HEADS), r"rows have shape \[\], and the plan has 7 rows"),
        ([1.0], distca.plan(CUT, HEADS), "rows are a list; a torch.Tensor is expected"),
        (torch.zeros(7, 2), CUT, "plan is a Layout; a distca.Plan or distca.Plans is expected"),
        (torch.zeros(7, 2), distca.plan(CUT, HEADS), "that of rank 0 of 3, and there is no context 'nobody'"),
    ],
)
def test_mistakes_are_told(rows: Any, plan: Any, message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=f"^gather_documents: .*{message}"):
        distca.gather_documents(rows, plan, context="nobody")


def test_too_few_results_and_a_context_of_other_ranks_are_told() -> None:
    documents = distca.gather_documents(_rows(IN_PLACE, 0), distca.plan(IN_PLACE, HEADS))
    with pytest.raises(distca.InvalidArgumentError, match=r"results have shape \[6, 2\]; 7 rows are expected"):
        documents.scatter(torch.zeros(6, 2))
    with pytest.raises(distca.InvalidArgumentError, match="results are a list"):
        documents.scatter([1.0])
    plan = distca.plan(distca.Layout([[(0, 0, 4)], [(0, 4, 6)]]), HEADS)
    with loopback_group(distca.plan(CUT, HEADS), timeout=20.0) as contexts:
        errors = outcomes(contexts, lambda r, c: distca.gather_documents(torch.zeros(4, 2), plan, context=c))
    for rank, error in enumerate(errors):
        assert isinstance(error, distca.InvalidArgumentError) and f"is that of rank {rank} of 3" in str(error), error
