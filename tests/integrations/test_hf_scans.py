"""Recurrences of documents that are cut between ranks, each rank computing some heads, are those of whole documents."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import tiny
from families.cases import CASES, REFUSED
from transformers.integrations import hub_kernels

import distca
from distca.current import Current
from distca.integrations.hf_limits import examine
from distca.integrations.hf_recurrent import looks_by_functions
from distca.integrations.hf_scans import MODULES, along_documents, along_function, functions_of
from support.branches import Tree, rows_of, rows_on
from support.groups import loopback_group, on_all_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels

#: A document of one row, one that is cut, two that go on from the middle and the end of it, and one that stays.
TREE = Tree([1, 70, 90, 75, 9], [range(1), range(70), range(40, 90), range(70, 75), range(9)], {2: 1, 3: 1})
SEGMENTS = [
    [(1, 0, 30), (2, 60, 90), (-1, 0, 2), (1, 30, 33)],
    [(0, 0, 1), (2, 40, 60), (1, 50, 70)],
    [(4, 0, 9), (1, 33, 50), (3, 70, 75)],
]
RANKS = (1, 3, 5)
#: Of the result, and of the others, each of which serves several.
HEADS = {
    "as many": (6, 6),
    "two for each": (6, 3),
    "four for each, which ranks share": (8, 2),
    "one for all": (5, 1),
    "fewer than ranks": (2, 1),
}

QWEN = ("qwen3_next", "torch_chunk_gated_delta_rule")


def _layout(ranks: int) -> distca.Layout:
    """The segments on up to three ranks; others have padding."""
    of_ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for number, segments in enumerate(SEGMENTS):
        of_ranks[number % ranks] += segments
    return distca.Layout([segments or [(-1, 0, 1)] for segments in of_ranks], branches=TREE.branches)


def _found_in(entry: str, name: str) -> Callable[..., Any]:
    """A function of a model's file, which is prepared to run along documents."""
    if entry not in tiny.CLASSES:
        pytest.skip(f"this version of transformers has no {entry}")
    model = tiny.model_of(*_tiny(entry))
    if not any(functions_of(module) for module in model.modules()):
        pytest.skip("this version of transformers has no such functions")
    return getattr(importlib.import_module(type(model).__module__), name)


def _tiny(entry: str) -> tuple[str, str, dict[str, Any]]:
    case = next(case for case in CASES.values() if case.entry == entry and case.recurrent)
    return entry, "eager", case.options


class _Scan:
    """A recurrence and its arguments: of each row, of each head, and the other ones."""

    def __init__(self, entry: str, name: str, heads: tuple[int, int]) -> None:
        self.function = _found_in(entry, name)
        num_heads, others = heads
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        rows = sum(map(len, TREE.own))
        self.is_rows_last = name == "mamba_selective_scan"
        self.by_name: dict[str, Any] = {}
        if self.is_rows_last:
            self.rows = {
                "hidden_states": draw(rows, num_heads),
                "dt": draw(rows, num_heads) * 0.3,
                "z": draw(rows, num_heads),
                "B": draw(rows, 4),
                "C": draw(rows, 4),
            }
            self.of_heads = {
                "A": -draw(num_heads, 4).exp(),
                "D": draw(num_heads),
                "delta_bias": draw(num_heads),
            }
            self.by_name = {"delta_softplus": True}
        elif name == "mamba2_chunk_scan":
            self.rows = {
                "hidden_states": draw(rows, num_heads, 5),
                "dt": draw(rows, num_heads),
                "B": draw(rows, others, 4),
                "C": draw(rows, others, 4),
            }
            self.of_heads = {"A": -draw(num_heads).exp(), "D": draw(num_heads), "dt_bias": draw(num_heads)}
            self.by_name = {"chunk_size": 16, "dt_softplus": True, "z": None}
        else:
            gate = (num_heads, 4) if name == "chunk_kimi_delta_attention" else (num_heads,)
            self.rows = {
                "query": draw(rows, others, 4),
                "key": draw(rows, others, 4),
                "value": draw(rows, num_heads, 5),
                "g": -draw(rows, *gate).exp() * 0.3,
                "beta": draw(rows, num_heads).sigmoid(),
            }
            self.of_heads = {}
            self.by_name = {"use_qk_l2norm_in_kernel": True, "output_final_state": False}

    def __call__(self, rows: dict[str, torch.Tensor], of_heads: dict[str, torch.Tensor]) -> torch.Tensor:
        """The results ``[T, heads, ...]`` of rows; the first three arguments are given by place."""
        if self.is_rows_last:
            rows = {name: value.movedim(0, -1) for name, value in rows.items()}
        by_name = {name: value[None] for name, value in rows.items()} | of_heads | self.by_name
        first = ("hidden_states", "dt", "A") if "dt" in by_name else ("query", "key", "value")
        by_place = [by_name.pop(name) for name in first]
        result = self.function(*by_place, **by_name)
        result = result[0] if isinstance(result, tuple) else result
        return result[0].movedim(-1, 0) if self.is_rows_last else result[0]


def _assert_as_alone(scan: _Scan, ranks: int) -> None:
    layout = _layout(ranks)
    numbers = {row: at for at, row in enumerate((d, r) for d, own in enumerate(TREE.own) for r in own)}
    rows = {name: value.clone().requires_grad_() for name, value in scan.rows.items()}
    of_heads = {name: value.clone().requires_grad_() for name, value in scan.of_heads.items()}
    expected = []
    for document, own in enumerate(TREE.own):
        seen = torch.tensor([numbers[row] for row in rows_of(TREE, document)])
        expected.append(scan({name: value[seen] for name, value in rows.items()}, of_heads)[own.start :])
    of_all = torch.cat(expected)
    weights = torch.randn(of_all.shape, generator=torch.Generator().manual_seed(1))
    (of_all * weights).sum().backward()
    plan = distca.plan(layout, distca.Heads(1, 1, 8))

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
        at = torch.tensor([numbers.get(row, -1) for row in rows_on(layout, rank)])
        mine = {name: value[at.clamp(min=0)].clone().requires_grad_() for name, value in scan.rows.items()}
        heads = {name: value.clone().requires_grad_() for name, value in scan.of_heads.items()}
        with along_documents(Current(plan.for_rank(rank), context)) as called:
            found = scan(mine, heads)
        assert len(called) == 1 and found.shape == (len(at), *of_all.shape[1:])
        (found * weights[at.clamp(min=0)] * (at >= 0).reshape(-1, *[1] * (found.dim() - 1))).sum().backward()
        torch.testing.assert_close(found[at >= 0], of_all[at[at >= 0]], rtol=1e-4, atol=1e-5)
        return at, {name: value.grad for name, value in mine.items()}, {n: v.grad for n, v in heads.items()}

    summed = {name: torch.zeros_like(value) for name, value in of_heads.items()}
    with loopback_group(plan, timeout=20.0) as contexts:
        for at, gradients_of_rows, gradients_of_heads in on_all_ranks(contexts, work):
            for name, gradient in gradients_of_rows.items():
                wanted = rows[name].grad
                bound = 1e-5 * float(wanted.abs().max())
                torch.testing.assert_close(gradient[at >= 0], wanted[at[at >= 0]], rtol=1e-4, atol=bound)
            for name, gradient in gradients_of_heads.items():
                summed[name] += gradient
    for name, gradient in summed.items():
        torch.testing.assert_close(gradient, of_heads[name].grad, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("entry", "name"), [("qwen3_next", "torch_chunk_gated_delta_rule"), ("nemotron_h", "mamba2_chunk_scan")]
)
def test_heads_that_share_others_are_computed_as_alone(entry: str, name: str, heads: str, ranks: int) -> None:
    scan = _Scan(entry, name, HEADS[heads])
    try:
        scan(scan.rows, scan.of_heads)
    except RuntimeError:
        pytest.skip("in this version of transformers modules repeat heads that several others share")
    _assert_as_alone(scan, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("entry", "name"), [("kimi_linear", "chunk_kimi_delta_attention"), ("jamba", "mamba_selective_scan")]
)
def test_heads_that_share_none_are_computed_as_alone(entry: str, name: str, ranks: int) -> None:
    _assert_as_alone(_Scan(entry, name, HEADS["as many"]), ranks)


def _made_module(func: Callable[..., Any], is_replaced: bool) -> torch.nn.Module:
    """A function as the package kernels makes a module of it, and replaces it by a kernel of the hub."""

    class Made(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    of_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [of_self, *inspect.signature(func).parameters.values()]
    Made.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    made = Made()
    if is_replaced:
        made.forward = lambda *args, **kwargs: func(*args, **kwargs)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("kind", ["function", "module", "kernel of the hub"])
@pytest.mark.parametrize("keyword", ["cu_seqlens", "seq_idx", None])
def test_a_kernel_that_keeps_packed_documents_apart_is_called_once(
    keyword: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel as of flash-linear-attention or mamba-ssm, which sums the values of each document; None has neither.
    Nothing is known of a kernel of the hub.
    """
    decorate = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if decorate is None:
        pytest.skip("this version of transformers has no such functions")
    calls: list[Any] = []

    def sums(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
        calls.append(x.shape[1])
        return torch.cat([x[:, begin:end].cumsum(1) for begin, end in zip([0, *ends], ends, strict=False)], dim=1)

    def by_cu_seqlens(q: Any, k: Any, v: torch.Tensor, cu_seqlens: Any = None) -> Any:
        return sums(v, [v.shape[1]] if cu_seqlens is None else cu_seqlens[1:].tolist()), None

    def by_seq_idx(x: torch.Tensor, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, seq_idx: Any = None) -> Any:
        numbers = torch.zeros(1, x.shape[1], dtype=torch.int32) if seq_idx is None else seq_idx
        assert numbers.shape == (1, x.shape[1]) and numbers.dtype == torch.int32
        return sums(x, [*numbers[0].bincount().cumsum(0).tolist()])

    def by_none(q: Any, k: Any, v: torch.Tensor) -> Any:
        return sums(v, [v.shape[1]]), None

    kernel = {"cu_seqlens": by_cu_seqlens, "seq_idx": by_seq_idx, None: by_none}[keyword]
    entry, name = ("bamba", "mamba2_chunk_scan") if keyword == "seq_idx" else QWEN
    original = _found_in(entry, name).__wrapped__.__wrapped__  # transformers' own code
    package = types.ModuleType("distca_tests_kernels")
    package.kernel = kernel
    monkeypatch.setitem(sys.modules, "distca_tests_kernels", package)
    wrapped = decorate("kernel", "distca_tests_kernels")(original)
    if "is_new_implementation" not in inspect.getclosurevars(wrapped).nonlocals:
        pytest.skip("this version of transformers does not say which kernels it has")
    layout = distca.Layout([[(0, 0, 5), (1, 0, 3), (2, 0, 4)], [(2, 4, 6), (3, 0, 1), (3, 1, 2)]])
    plan = distca.plan(layout, distca.Heads(1, 1, 8))
    run = along_function(name, wrapped if kind == "function" else _made_module(wrapped, kind == "kernel of the hub"))

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        x = torch.ones(1, layout.num_rows(rank), 2, 3)
        with along_documents(Current(plan.for_rank(rank), context)):
            if keyword == "seq_idx":
                return run(x, x[..., 0], torch.ones(2), x, x, chunk_size=4)[0, :, :, 0]
            return run(x, x, x, g=x[..., 0], beta=x[..., 0])[0][0, :, :, 0]

    with loopback_group(plan, timeout=20.0) as contexts:
        for rank, found in enumerate(on_all_ranks(contexts, work)):
            expected = [
                float(position + 1) for _, begin, end in layout.segments(rank) for position in range(begin, end)
            ]
            assert found.tolist() == [[value] * 2 for value in expected]
    # Whole documents of both ranks, and the cut one on both.
    is_known = keyword is not None and kind != "kernel of the hub"
    assert sorted(calls) == ([2, 6, 6, 8] if is_known else [2, 3, 5, 6, 6])


def test_outside_of_documents_a_function_runs_as_always() -> None:
    scan = _Scan("qwen3_next", "torch_chunk_gated_delta_rule", (4, 4))
    original = scan.function.__wrapped__
    found = scan(scan.rows, scan.of_heads)
    scan.function = original
    assert torch.equal(found, scan(scan.rows, scan.of_heads))


def test_every_model_says_how_its_recurrent_modules_are_computed() -> None:
    """Those of these kinds have functions of other names, or none, and compute whole documents."""
    whole = {"MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "ZayaCCAProjection"}
    refused = {name for names in REFUSED.values() for name in names}
    by_rows: dict[str, bool] = {}
    for name, case in CASES.items():
        if case.recurrent and name not in refused:
            for module in examine(tiny.model_of(case.entry, "distca", case.options)).recurrent.values():
                by_rows[type(module).__name__] = looks_by_functions(module)
    if not any(by_rows.values()):
        pytest.skip("this version of transformers has no such functions")
    assert by_rows == {name: name not in whole for name in by_rows}
    assert set(by_rows) - whole == MODULES or "lara_mini" not in tiny.CLASSES  # older versions lack some
