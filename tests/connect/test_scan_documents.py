"""Recurrences of a user's own over documents that ranks share by heads, and halos for short convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import distca
from support import ranks as processes
from support.groups import loopback_group, on_all_ranks

HEADS = distca.Heads(1, 1, 8)
LAYOUTS = {
    "cut": distca.Layout([[(0, 0, 4), (1, 0, 3)], [(1, 3, 9), (-1, 0, 2)], [(2, 0, 5), (1, 9, 10)]]),
    "in place": distca.Layout.from_documents([[4, 3], [9], [5]]),
    "shared": distca.Layout([[(0, 0, 4), (1, 4, 6)], [(2, 4, 7)], [(3, 0, 2)]], branches={1: 0, 2: 0}),
    "a rank without rows": distca.Layout([[(0, 0, 4)], [], [(0, 4, 9), (1, 0, 2)]]),
}
CUT = LAYOUTS["cut"]


def _path(layout: distca.Layout, document: int, position: int) -> list[tuple[int, int]]:
    """The rows that a row sees, itself the last, as (document, position)."""
    before = [(of, p) for of, begin, end in dict(layout.branches).get(document, []) for p in range(begin, end)]
    first = layout._own_rows()[document].start if document >= 0 else 0
    return before + [(document, p) for p in range(first, position + 1)]


def _rows(layout: distca.Layout, rank: int) -> list[tuple[int, int]]:
    return [(document, p) for document, begin, end in layout.segments(rank) for p in range(begin, end)]


def _value(document: int, position: int, head: int) -> float:
    return float(10 * document + position) / (head + 1)


def _tensor(layout: distca.Layout, rank: int, heads: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = [[[_value(d, p, head)] for head in range(heads)] for d, p in _rows(layout, rank)]
    return torch.tensor(values, dtype=dtype).reshape(-1, heads, 1)


def _sums(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """For each head the sum of x and y so far in the document, times the head's scale; y's heads serve several."""
    assert cu_seqlens.dtype == torch.int32
    bounds = cu_seqlens.tolist()
    assert bounds[-1] == len(x) == len(y) and x.shape[1] % y.shape[1] == 0
    both = x + y.repeat_interleave(x.shape[1] // y.shape[1], dim=1)
    sums = [both[begin:end].cumsum(dim=0) for begin, end in zip(bounds, bounds[1:], strict=False)]
    return (torch.cat(sums) * scale[:, None])[..., 0]


def _expected(layout: distca.Layout, rank: int, heads: int, others: int, scale: torch.Tensor) -> torch.Tensor:
    found = []
    for row in _rows(layout, rank):
        path = _path(layout, *row)
        found.append(
            [
                sum(_value(d, p, head) + _value(d, p, head // (heads // others)) for d, p in path) * float(scale[head])
                for head in range(heads)
            ]
        )
    return torch.tensor(found, dtype=torch.float64).reshape(-1, heads)


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (2, 1)], ids=["as many", "two for each", "fewer than ranks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recurrence_is_that_of_whole_documents(layout: str, heads: tuple[int, int]) -> None:
    num_heads, others = heads
    of_all = LAYOUTS[layout]
    plan = distca.plan(of_all, HEADS)
    scale = torch.arange(1.0, num_heads + 1, dtype=torch.float64)

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, torch.Tensor]:
        x = _tensor(of_all, rank, num_heads).requires_grad_()
        of_head = scale.clone().requires_grad_()
        found = distca.scan_documents(
            _sums,
            {"x": x, "y": _tensor(of_all, rank, others)},
            plan.for_rank(rank),
            of_heads={"scale": of_head},
            context=context,
        )
        torch.testing.assert_close(found, _expected(of_all, rank, num_heads, others, scale))
        found.sum().backward()
        return x.grad, of_head.grad

    with loopback_group(plan, timeout=20.0) as contexts:
        gradients = on_all_ranks(contexts, work)
    # A row counts once for each row of the batch that sees it.
    seen = [row for rank in range(3) for own in _rows(of_all, rank) for row in _path(of_all, *own)]
    for rank, (gradient, _) in enumerate(gradients):
        for row, found in zip(_rows(of_all, rank), gradient, strict=True):
            if row[0] >= 0:
                assert torch.equal(found[:, 0], seen.count(row) * scale)
    of_heads = sum(_expected(of_all, rank, num_heads, others, scale).sum(dim=0) / scale for rank in range(3))
    torch.testing.assert_close(sum(gradient for _, gradient in gradients), of_heads)


def test_ranks_compute_equally_many_heads_of_a_long_document() -> None:
    plan = distca.plan(distca.Layout([[(0, 0, 3)], [(0, 3, 8)]]), HEADS)

    def work(rank: int, context: distca.Context) -> list[list[int]]:
        shapes = []

        def scan(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            shapes.append([*x.shape, *cu_seqlens.tolist()])
            return x

        distca.scan_documents(scan, {"x": torch.zeros(3 + 2 * rank, 5, 7)}, plan.for_rank(rank), context=context)
        return shapes

    with loopback_group(plan, timeout=20.0) as contexts:
        assert on_all_ranks(contexts, work) == [[[8, 2, 7, 0, 8]], [[8, 3, 7, 0, 8]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_have_the_rows_before_them_in_front(layout: str) -> None:
    of_all = LAYOUTS[layout]
    plan = distca.plan(of_all, HEADS)
    taps = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def work(rank: int, context: distca.Context) -> None:
        rows = _tensor(of_all, rank, 2)
        pieces = distca.exchange_halos(rows, plan.for_rank(rank), 2, context=context)
        padded = F.pad(pieces.rows[..., 0], (0, 0, 2, 0))
        found = pieces.crop(sum(tap * padded[i : i + len(pieces.rows)] for i, tap in enumerate(taps)))
        for row, of_row in zip(_rows(of_all, rank), found, strict=True):
            path = _path(of_all, *row)[-3:]
            for head in range(2):
                values = [_value(*seen, head) for seen in path]
                assert of_row[head] == pytest.approx(
                    sum(a * b for a, b in zip(taps[-len(path) :], values, strict=True))
                )

    with loopback_group(plan, timeout=20.0) as contexts:
        on_all_ranks(contexts, work)


def _on_a_rank() -> list[torch.Tensor]:
    rank = dist.get_rank()
    found = []
    with distca.init(max_tokens=16, heads=HEADS, timeout=60.0) as context:
        plan = distca.plan(CUT, HEADS, rank=rank, context=context)
        for dtype in (torch.float32, torch.bfloat16):
            x = _tensor(CUT, rank, 4, dtype).requires_grad_()
            number = torch.full((len(x), 1), rank)  # another dtype, that is not differentiable

            def scan(x: torch.Tensor, number: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
                bounds = cu_seqlens.tolist()
                sums = [x[begin:end].float().cumsum(0) for begin, end in zip(bounds, bounds[1:], strict=False)]
                return torch.cat([torch.cat(sums), number[:, None].expand(-1, x.shape[1], 1)], dim=-1)

            results = distca.scan_documents(scan, {"x": x, "number": number}, plan)
            assert (results[..., 1] == rank).all()
            results[..., 0].sum().backward()
            found += [results.detach()[..., 0], x.grad.float()]
    return found


def test_processes_exchange_tensors_of_several_dtypes() -> None:
    of_ranks = processes.launch(_on_a_rank, ranks=3)
    for rank, (results, gradient, rounded, gradient_of_rounded) in enumerate(of_ranks):
        expected = [[sum(_value(*s, h) for s in _path(CUT, *row)) for h in range(4)] for row in _rows(CUT, rank)]
        torch.testing.assert_close(results, torch.tensor(expected))
        torch.testing.assert_close(rounded, torch.tensor(expected), rtol=2**-7, atol=0.0)
        lengths = {**dict(enumerate(CUT.document_lengths)), -1: 2}
        counts = torch.tensor([float(lengths[d] - p) for d, p in _rows(CUT, rank)])
        for found in (gradient, gradient_of_rounded):
            assert torch.equal(found[..., 0], counts[:, None].expand(-1, 4))


def _scan(x: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": {}}, r"rows are \{\}; tensors by their names are expected"),
        ({"rows": [torch.zeros(7, 2)]}, "rows are a list; tensors by their names are expected"),
        ({"rows": {"x": torch.zeros(6, 2)}}, r"rows\['x'\] have shape \[6, 2\], and the plan has 7 rows on rank 0"),
        ({"rows": {"x": torch.zeros(7)}}, r"rows\['x'\] have shape \[7\]; \[rows, heads, ...\] is expected"),
        ({"rows": {"x": torch.zeros(7, 0)}}, r"rows\['x'\] have shape \[7, 0\]"),
        ({"rows": {"x": torch.zeros(7, 3), "y": torch.zeros(7, 2)}}, r"rows\['y'\] have shape .* a multiple of"),
        ({"rows": {"x": [1.0]}}, r"rows\['x'\] are a list; a torch.Tensor is expected"),
        ({"of_heads": [torch.zeros(2)]}, "of_heads are a list; tensors by their names are expected"),
        ({"of_heads": {"a": [1.0, 2.0]}}, r"of_heads\['a'\] is a list; a torch.Tensor is expected"),
        ({"of_heads": {"a": torch.zeros(3)}}, r"of_heads\['a'\] has shape \[3\]; \[2, ...\] is expected"),
        ({"of_heads": {"x": torch.zeros(2)}}, "'x' is in rows and in of_heads"),
        ({"plan": CUT}, "plan is a Layout; a distca.Plan or distca.Plans is expected"),
        ({"context": "nobody"}, "the plan is that of rank 0 of 3, and there is no context 'nobody'"),
        ({"scan": lambda **_: None}, r"scan returned a NoneType; \[7, 2, ...\] is expected"),
        ({"scan": lambda x, cu_seqlens: x[1:]}, r"scan returned \[6, 2\]; \[7, 2, ...\] is expected"),
    ],
)
def test_mistakes_are_told(changed: dict[str, Any], message: str) -> None:
    plan = distca.plan(CUT if "context" in changed else LAYOUTS["in place"], HEADS)
    arguments = {"scan": _scan, "rows": {"x": torch.zeros(7, 2)}, "plan": plan} | changed
    with pytest.raises(distca.InvalidArgumentError, match=f"^scan_documents: {message}"):
        distca.scan_documents(**arguments)


@pytest.mark.parametrize("width", [-1, 1.5, "3", None, True])
def test_a_width_that_is_none_is_told(width: Any) -> None:
    plan = distca.plan(LAYOUTS["in place"], HEADS)
    with pytest.raises(distca.InvalidArgumentError, match="exchange_halos: width is"):
        distca.exchange_halos(torch.zeros(7, 2), plan, width)


def test_too_few_results_of_pieces_are_told() -> None:
    pieces = distca.exchange_halos(torch.zeros(7, 2), distca.plan(LAYOUTS["in place"], HEADS), 3)
    assert len(pieces.rows) == 7 + 2 * 3
    with pytest.raises(distca.InvalidArgumentError, match=r"crop: results have shape \[7, 2\]; 13 rows are expected"):
        pieces.crop(torch.zeros(7, 2))


@pytest.mark.parametrize("way", ["scan", "halos", "gather"])
def test_a_plan_that_was_first_used_in_inference_mode_can_be_trained_with(way: str) -> None:
    """As by a trainer that evaluates before the first step. What is kept with the layout has tensors of numbers."""
    plan = distca.plan(distca.Layout([[(0, 0, 4)], [(0, 4, 9)]]), HEADS)

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        def run(rows: torch.Tensor) -> torch.Tensor:
            mine = plan.for_rank(rank)
            if way == "scan":
                return distca.scan_documents(_scan, {"x": rows}, mine, context=context)
            if way == "halos":
                pieces = distca.exchange_halos(rows, mine, 2, context=context)
                return pieces.crop(pieces.rows)
            documents = distca.gather_documents(rows, mine, context=context)
            return documents.scatter(documents.rows)

        with torch.inference_mode():
            run(torch.ones(4 + rank, 2, 3))
        rows = torch.ones(4 + rank, 2, 3, requires_grad=True)
        run(rows).sum().backward()
        return rows.grad

    with loopback_group(plan, timeout=20.0) as contexts:
        for rank, gradient in enumerate(on_all_ranks(contexts, work)):
            assert torch.equal(gradient, torch.ones(4 + rank, 2, 3))
