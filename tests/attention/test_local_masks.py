"""Masks of `distca.attention`: a window, and the full mask, under which queries and keys may differ in number."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import distca
from support import flash_on_cpu
from support.batches import LENGTHS, Batch, random_batch
from support.groups import compute
from support.local_tasks import cut, whole, whole_documents
from support.oracle import NAMES, ErrorPool, oracle, torch_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
#: Those under which documents may be in pieces, and those that reach to both sides.
CUT: list[dict[str, Any]] = [{"mask": "full"}, {"window": 1}, {"window": 50}, {"window": 64}]
BOTH_SIDES: list[dict[str, Any]] = [{"mask": "full", "window": window} for window in (1, 64, 90)]
MASKS = [*CUT, {"window": 10**12}, *BOTH_SIDES, {"mask": "full", "window": 10**12}]
BY = {"the kernel": distca.attention, "flash": torch.ops.distca.attention_by_flash}


@pytest.fixture(autouse=True)
def _flash_on_cpu() -> None:
    flash_on_cpu.register()


def _compute(
    batch: Batch, tasks: torch.Tensor | None, operator: Any = distca.attention, **options: Any
) -> tuple[torch.Tensor, ...]:
    q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
    out, lse = operator(q, k, v, tasks, **options)
    out.backward(batch.dout)
    return out.detach(), lse, q.grad, k.grad, v.grad


def pieces(lengths: Sequence[int], seed: int, mask: str = "causal") -> torch.Tensor:
    """Tasks that cut documents at random rows. Under the full mask each sees all keys of its document."""
    tasks = cut(lengths, seed)
    if mask == "full":
        ends = {begin: end for begin, end, *_ in whole(lengths)}
        tasks = [(a, b, begin, ends[begin]) for a, b, begin, _ in tasks]
    random.Random(seed).shuffle(tasks)
    return torch.tensor(tasks)


@DTYPES
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_each_mask_is_as_exact_as_pytorch_and_gives_the_bits_of_a_plan(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    heads, pool = distca.Heads(4, 2, 32, 40, dtype), ErrorPool(dtype)
    asked = options if options.get("window", 0) < 1000 else {"mask": options.get("mask", "causal")}
    layout = distca.Layout.from_documents([LENGTHS])
    for seed in range(5):
        batch = random_batch(LENGTHS, heads, seed)
        ours = _compute(batch, whole_documents(LENGTHS), **options)
        pool.add(ours, torch_attention(batch, **asked), oracle(batch, **asked))
        for name, a, b in zip(NAMES, ours, compute(batch, distca.plan(layout, heads, **asked)), strict=True):
            assert torch.equal(a, b), name
    pool.check()


@DTYPES
@pytest.mark.parametrize("options", CUT[:3], ids=str)
def test_a_document_in_pieces_gives_bitwise_what_it_gives_whole(options: dict[str, Any], dtype: torch.dtype) -> None:
    batch = random_batch(LENGTHS, distca.Heads(4, 2, 24, dtype=dtype), 3)
    right = _compute(batch, whole_documents(LENGTHS), **options)
    for seed in range(4):
        found = _compute(batch, pieces(LENGTHS, seed, options.get("mask", "causal")), **options)
        for name, a, b in zip(NAMES[:3], found, right, strict=False):
            assert torch.equal(a, b), name
        for a, b in zip(found[3:], right[3:], strict=True):  # sums over rows, in another order
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "in_pieces"), [(options, False) for options in CUT + BOTH_SIDES] + [(options, True) for options in CUT]
)
def test_flash_attention_has_these_masks_too(options: dict[str, Any], in_pieces: bool) -> None:
    heads = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
    pool = ErrorPool(heads.dtype)
    for seed in range(5):
        batch = random_batch(LENGTHS, heads, seed)
        tasks = pieces(LENGTHS, seed, options.get("mask", "causal")) if in_pieces else whole_documents(LENGTHS)
        ours = _compute(batch, tasks, BY["flash"], **options)
        pool.add(ours, torch_attention(batch, **options), oracle(batch, **options))
    pool.check(1.5 if in_pieces else 1.1)


#: Query rows, and tasks of documents that have fewer queries than keys, or more.
CROSS = {
    "fewer": (90, [(60, 90, 0, 100), (0, 25, 0, 100), (25, 26, 100, 107), (26, 60, 107, 300)]),
    "more": (900, [(0, 300, 0, 7), (300, 333, 7, 8), (400, 900, 8, 100), (333, 400, 8, 100)]),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("rows", "tasks"), CROSS.values(), ids=CROSS)
def test_under_the_full_mask_queries_may_be_fewer_or_more_than_keys(
    by: str, dtype: torch.dtype, rows: int, tasks: list[tuple[int, ...]]
) -> None:
    """Cross attention: each document has queries of its own, in two tasks that come in any order."""
    generator = torch.Generator().manual_seed(1)
    keys = tasks[-1][3]
    q, k, v = (torch.randn(n, 2, 32, generator=generator).to(dtype) for n in (rows, keys, keys))
    found = [t.requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
    out, lse = BY[by](*found, torch.tensor(tasks), mask="full")
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(dout)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    right = torch.zeros(rows, 2, 32, dtype=torch.float64)
    for a, b, c, d in tasks:
        scores = torch.einsum("ihd,jhd->hij", wide[0][a:b], wide[1][c:d]) * 32**-0.5
        right[a:b] = torch.einsum("hij,jhd->ihd", scores.softmax(2), wide[2][c:d])
        torch.testing.assert_close(lse[a:b].double(), torch.logsumexp(scores, 2).T, rtol=1e-4, atol=1e-4)
    right.backward(dout.double())
    for mine, exact in ((out, right), *((a.grad, b.grad) for a, b in zip(found, wide, strict=True))):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-2, atol=2e-2)


def test_without_tasks_the_mask_is_that_of_one_document() -> None:
    batch = random_batch((100,), distca.Heads(2, 1, 16), 1)
    for options in MASKS[:3]:
        for a, b in zip(
            _compute(batch, None, **options), _compute(batch, whole_documents((100,)), **options), strict=True
        ):
            assert torch.equal(a, b)
    out = _compute(batch, None, window=1)[0]
    torch.testing.assert_close(out, batch.v.expand(-1, 2, -1))  # a row sees itself alone


@DTYPES
def test_keys_outside_of_the_window_take_no_part_not_even_times_zero(dtype: torch.dtype) -> None:
    batch = random_batch((200,), distca.Heads(2, 1, 16, dtype=dtype), 2)
    right = distca.attention(batch.q, batch.k, batch.v, window=30)
    batch.k[:100], batch.v[:100] = math.nan, math.inf
    for a, b in zip(distca.attention(batch.q, batch.k, batch.v, window=30), right, strict=True):
        assert torch.equal(a[129:], b[129:]) and not a[:129].isfinite().all()


def test_sinks_softcap_and_the_gradient_of_lse_go_with_masks() -> None:
    heads = distca.Heads(4, 2, 32)
    batch, layout = random_batch(LENGTHS, heads, 5), distca.Layout.from_documents([LENGTHS])
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    with distca.init(max_tokens=sum(LENGTHS), heads=heads, name="masks") as context:
        for options in MASKS[:3]:
            plan, results = distca.plan(layout, heads, **options), []
            for call in (
                lambda *rows, **more: distca.attention(*rows, whole_documents(LENGTHS), **options, **more),  # noqa: B023
                lambda *rows, **more: distca.core_attention(*rows, plan, context=context, **more),  # noqa: B023
            ):
                leaves = [t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v, sinks)]
                out, lse = call(*leaves[:3], sinks=leaves[3], softcap=5.0)
                torch.autograd.backward([out, lse], [batch.dout, torch.cos(lse.detach())])
                results.append([out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)])
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("options", CUT[:3], ids=str)
def test_compiled_code_has_the_mask(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    batch = random_batch((70, 30), distca.Heads(2, 1, 16), 6)
    tasks = whole_documents((70, 30))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return distca.attention(q, k, v, tasks, **options)[0].sin()

    results = []
    for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v)]
        out = call(*leaves)
        out.backward(batch.dout)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask": "causal "}, "mask = 'causal '"),
        ({"mask": None}, "mask = None"),
        ({"window": 0}, "window = 0"),
        ({"window": -3}, "window = -3"),
        ({"window": 2.5}, "window = 2.5"),
        ({"window": torch.tensor(5.0)}, "window = tensor"),
        ({"window": True}, "window = True"),
        ({"mask": torch.ones(2)}, "mask = tensor"),
        ({"window": 0, "mask": "full"}, "window = 0"),
    ],
)
def test_unknown_masks_are_refused(options: dict[str, Any], said: str) -> None:
    batch = random_batch((20,), distca.Heads(2, 1, 16), 1)
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.attention(batch.q, batch.k, batch.v, **options)


@pytest.mark.parametrize("operator", [torch.ops.distca.attention, torch.ops.distca.attention_by_flash])
@pytest.mark.parametrize(
    ("options", "said"),
    [({"mask": "none"}, 'mask = "none"'), ({"window": 0}, "window = 0"), ({"window": 0, "mask": "full"}, "window = 0")],
)
def test_operators_refuse_unknown_masks(operator: Any, options: dict[str, Any], said: str) -> None:
    batch = random_batch((20,), distca.Heads(2, 1, 16, dtype=torch.bfloat16), 1)
    with pytest.raises(Exception, match=said):
        operator(batch.q, batch.k, batch.v, whole_documents((20,)), **options)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([[0, 10, 0, 20], [10, 20, 0, 19]], "have the same keys; those from key row 0 on end at 19 and at 20"),
        ([[0, 10, 0, 20], [5, 15, 0, 20]], "two tasks have query row 5"),
        ([[0, 10, 0, 20], [10, 15, 19, 30]], "overlap"),
    ],
)
def test_tasks_that_make_no_sense_under_the_full_mask_are_refused(tasks: list[list[int]], said: str) -> None:
    batch = random_batch((30,), distca.Heads(2, 1, 16), 1)
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.attention(batch.q, batch.k, batch.v, torch.tensor(tasks), mask="full")


def test_under_a_causal_mask_one_document_has_no_more_queries_than_keys() -> None:
    batch = random_batch((30,), distca.Heads(2, 1, 16), 1)
    with pytest.raises(distca.InvalidArgumentError, match="q has 30 rows and k 20; without tasks"):
        distca.attention(batch.q, batch.k[:20], batch.v[:20])
    with pytest.raises(distca.InvalidArgumentError, match="q has 30 rows and k 20; without tasks"):
        distca.attention(batch.q, batch.k[:20], batch.v[:20], mask="full", window=5)


@pytest.mark.parametrize("by", BY)
def test_the_last_query_is_aligned_with_the_last_key_where_a_window_reaches_to_both_sides(by: str) -> None:
    heads = distca.Heads(2, 1, 16, dtype=torch.bfloat16)
    batch = random_batch((100,), heads, 1)
    whole_out, whole_lse = BY[by](batch.q, batch.k, batch.v, whole_documents((100,)), mask="full", window=30)
    last = torch.tensor([[0, 40, 0, 100]])
    out, lse = BY[by](batch.q[60:], batch.k, batch.v, last, mask="full", window=30)
    assert torch.equal(out, whole_out[60:]) and torch.equal(lse, whole_lse[60:])
    with pytest.raises(Exception, match="two tasks have the document at key row 0; with the full mask and a window"):
        BY[by](batch.q, batch.k, batch.v, torch.tensor([[0, 10, 0, 90], [10, 20, 0, 100]]), mask="full", window=30)


def test_fake_tensors_have_every_mask() -> None:
    q, k, v = (torch.empty(20, heads, 16, device="meta") for heads in (2, 1, 1))
    for window in (None, 5):
        assert distca.attention(q, k, v, mask="full", window=window)[0].shape == (20, 2, 16)
