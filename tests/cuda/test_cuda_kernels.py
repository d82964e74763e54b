"""The library's own attention kernels on a GPU: exact, and with the same bits whatever the plan.

test_kernels_on_host.py holds what can be tested of them without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

import distca
from support.batches import LAYOUTS, random_batch, random_tasks, scattered
from support.gpus import missing_gpu
from support.groups import compute
from support.local_tasks import cut, whole
from support.oracle import NAMES, ErrorPool, oracle, torch_attention
from support.score_features import eager_attention, random_sinks

pytestmark = pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu())

LENGTHS = (300, 1, 129, 64, 513)
HEADS = {
    f"{name} {dim}/{v_dim}, {q}/{kv}": distca.Heads(q, kv, dim, v_dim, dtype)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for dim, v_dim, q, kv in (
        *((64, 64, 4, 2), (128, 128, 8, 1), (128, 128, 2, 2), (192, 128, 4, 2), (256, 256, 2, 1)),
        *((512, 512, 4, 1), (264, 512, 2, 2)),
    )
}
CUDA = {"device": "cuda", "attention": "own"}


@pytest.fixture(autouse=True)
def _deterministic() -> object:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def local(
    tensors: Sequence[torch.Tensor], tasks: Sequence[tuple[int, ...]], **options: object
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv of distca.attention, copied to the CPU."""
    q, k, v = (t.cuda().detach().requires_grad_() for t in tensors[:3])
    rows = torch.tensor(tasks, dtype=torch.int64).reshape(-1, 4)
    out, lse = distca.attention(q, k, v, rows, attention="own", **options)
    out.backward(tensors[3].cuda())
    return tuple(t.detach().cpu() for t in (out, lse, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_documents_are_as_exact_as_pytorch(heads: distca.Heads) -> None:
    pool = ErrorPool(heads.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        ours = local((batch.q, batch.k, batch.v, batch.dout), whole(LENGTHS))
        pool.add(ours, torch_attention(batch), oracle(batch))
    pool.check()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_rows_have_the_same_bits_whatever_the_tasks(heads: distca.Heads) -> None:
    batch = random_batch(LENGTHS, heads, 1)
    tensors = batch.q, batch.k, batch.v, batch.dout
    expected = local(tensors, whole(LENGTHS))
    for seed in range(3):
        for name, a, b in zip(NAMES[:3], local(tensors, cut(LENGTHS, seed)), expected, strict=False):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_have_the_same_bits_whatever_the_plan_and_the_ranks(layout: object) -> None:
    heads = HEADS["bf16 128/128, 8/1"]
    heads = dataclasses.replace(heads, kv=2)
    batch = random_batch(LENGTHS, heads, 2)
    expected = local((batch.q, batch.k, batch.v, batch.dout), whole(LENGTHS))
    for ranks in (1, 3):
        where = layout(LENGTHS, max(ranks, 2) if layout is LAYOUTS["spill_with_empty_ranks"] else ranks, 2)
        plan = distca.plan(where, heads, tasks=random_tasks(where, heads.kv, 2))
        for fused in (False, True):
            ours = compute(batch, plan, fused=fused, **CUDA)
            for name, a, b in zip(NAMES[:3], ours, expected, strict=False):
                assert torch.equal(a, b), (name, ranks, fused)


def test_gradients_of_keys_have_the_same_bits_in_every_run() -> None:
    heads = HEADS["bf16 64/64, 4/2"]
    batch = random_batch(LENGTHS, heads, 3)
    plan = distca.plan(scattered(LENGTHS, 3, 3), heads, tasks=random_tasks(scattered(LENGTHS, 3, 3), heads.kv, 3))
    first = compute(batch, plan, **CUDA)
    for _ in range(3):
        for name, a, b in zip(NAMES, compute(batch, plan, **CUDA), first, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize(("mask", "window"), [("causal", 20), ("causal", 200), ("full", None), ("full", 100)])
def test_masks_are_as_exact_as_pytorch(mask: str, window: int | None) -> None:
    heads = HEADS["bf16 64/64, 4/2"]
    pool = ErrorPool(heads.dtype)
    for seed in range(3):
        batch, layout = random_batch(LENGTHS, heads, seed), scattered(LENGTHS, 3, seed)
        plan = distca.plan(layout, heads, mask=mask, window=window, tasks=random_tasks(layout, heads.kv, seed))
        pool.add(compute(batch, plan, **CUDA), torch_attention(batch, mask, window), oracle(batch, None, mask, window))
    pool.check()


@pytest.mark.parametrize(("softcap", "with_sinks"), [(5.0, False), (0.0, True), (3.0, True)])
def test_softcap_and_sinks_are_as_exact_as_pytorch(softcap: float, with_sinks: bool) -> None:
    heads = HEADS["bf16 64/64, 4/2"]
    pool = ErrorPool(heads.dtype)
    for seed in range(3):
        batch = random_batch(LENGTHS, heads, seed)
        sinks = random_sinks(heads.q, seed) if with_sinks else None
        on_gpu = None if sinks is None else sinks.cuda()
        ours = local((batch.q, batch.k, batch.v, batch.dout), whole(LENGTHS), sinks=on_gpu, softcap=softcap)
        exact = eager_attention(batch, torch.float64, softcap, sinks)
        pool.add(ours, eager_attention(batch, heads.dtype, softcap, sinks)[:5], exact[:5])
    pool.check()


def test_a_context_says_that_its_bits_do_not_depend_on_the_plan() -> None:
    with distca.init(max_tokens=8, heads=HEADS["bf16 128/128, 8/1"], name="own", **CUDA) as context:
        assert context.plan_independent and context.attention.startswith("distca's kernels for compute capability")
