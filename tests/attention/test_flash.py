"""Attention over tasks by ATen's flash attention, which is what distca.attention uses on GPUs without kernels of their
own.

On the CPU a stand-in replaces ATen's operator. It follows the contract of the CUDA kernels (flash_on_cpu.py), so these
tests show that tasks become the right calls. Only a GPU can show that the kernels keep the contract.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import distca
from support import flash_on_cpu
from support.batches import random_batch
from support.gpus import no_gpu
from support.local_tasks import cut, whole
from support.oracle import ErrorPool, oracle, torch_attention
from support.score_features import eager_attention, random_sinks

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(bool(no_gpu()), reason=no_gpu()),
)
LENGTHS = (70, 1, 129, 64, 40)
HEADS = {
    "bf16": distca.Heads(4, 2, 32, dtype=torch.bfloat16),
    "fp16, one key head": distca.Heads(4, 1, 16, dtype=torch.float16),
    "bf16, as many": distca.Heads(2, 2, 64, dtype=torch.bfloat16),
}

flash = torch.ops.distca.attention_by_flash


@pytest.fixture(autouse=True)
def _flash_on_cpu() -> None:
    flash_on_cpu.register()


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def run(
    device: torch.device, tensors: Sequence[torch.Tensor], tasks: Sequence[tuple[int, ...]], **options: object
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv on the CPU."""
    q, k, v = (t.to(device).detach().requires_grad_() for t in tensors[:3])
    out, lse = flash(q, k, v, torch.tensor(tasks, dtype=torch.int64).reshape(-1, 4), **options)
    out.backward(tensors[3].to(device))
    return tuple(t.detach().cpu() for t in (out, lse, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tasks", [whole, cut])
def test_tasks_are_as_exact_as_pytorch(device: torch.device, heads: distca.Heads, tasks: object) -> None:
    pool = ErrorPool(heads.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        table = whole(LENGTHS) if tasks is whole else cut(LENGTHS, seed)
        ours = run(device, (batch.q, batch.k, batch.v, batch.dout), table)
        pool.add(ours, torch_attention(batch), oracle(batch))
    # Each task's part of dk and dv is rounded before the parts are added.
    pool.check(1.1 if tasks is whole else 1.5)


def test_rows_in_any_order_with_gaps_find_their_own_keys(device: torch.device) -> None:
    # Queries of two documents, the second of which comes first. Rows and keys between them belong to nobody.
    heads = HEADS["bf16"]
    batch = random_batch((50, 30), heads, 1)
    place_q, place_k = [(60, 110), (3, 33)], [(7, 57), (90, 120)]
    q, k, v, dout = (
        torch.full((130, *t.shape[1:]), math.nan).to(heads.dtype) for t in (batch.q, batch.k, batch.v, batch.dout)
    )
    for document, (rows_q, rows_k) in enumerate(zip(place_q, place_k, strict=True)):
        rows = slice(*batch.offsets[document : document + 2])
        q[slice(*rows_q)], dout[slice(*rows_q)] = batch.q[rows], batch.dout[rows]
        k[slice(*rows_k)], v[slice(*rows_k)] = batch.k[rows], batch.v[rows]
    tasks = [(*rows_q, *rows_k) for rows_q, rows_k in zip(place_q, place_k, strict=True)]
    out, lse, dq, dk, dv = run(device, (q, k, v, dout), tasks)
    expected = run(device, (batch.q, batch.k, batch.v, batch.dout), whole(batch.lengths))
    for name, t, e, place, fill in (
        ("out", out, expected[0], place_q, 0.0),
        ("lse", lse, expected[1], place_q, -math.inf),
        ("dq", dq, expected[2], place_q, 0.0),
        ("dk", dk, expected[3], place_k, 0.0),
        ("dv", dv, expected[4], place_k, 0.0),
    ):
        torch.testing.assert_close(torch.cat([t[slice(*rows)] for rows in place]), e, rtol=0.02, atol=0.02, msg=name)
        nobody = torch.ones(len(t), dtype=torch.bool)
        for rows in place:
            nobody[slice(*rows)] = False
        assert (t[nobody] == fill).all(), name


def test_heads_and_rows_that_are_expanded_give_the_same(device: torch.device) -> None:
    heads = HEADS["bf16"]
    batch = random_batch((33, 20), heads, 3)
    k, v = (t[:, :1].expand(-1, heads.kv, -1) for t in (batch.k, batch.v))
    dout = batch.dout[:1].expand(53, -1, -1)
    expected = run(device, [t.contiguous() for t in (batch.q, k, v, dout)], whole(batch.lengths))
    for mine, right in zip(run(device, (batch.q, k, v, dout), whole(batch.lengths)), expected, strict=True):
        assert torch.equal(mine, right)


def test_rows_that_are_strided_or_misaligned_give_the_same(device: torch.device) -> None:
    heads = HEADS["bf16"]
    batch = random_batch((33, 20), heads, 2)
    expected = run(device, (batch.q, batch.k, batch.v, batch.dout), whole(batch.lengths))
    wide = torch.zeros(53, 8, heads.dim + 3, dtype=heads.dtype)
    strided = wide[:, :4, 1:-2], wide[:, 4:6, 2:-1], wide[:, 6:, 3:]
    for view, t in zip(strided, (batch.q, batch.k, batch.v), strict=True):
        view.copy_(t)
    q, k, v = (t.to(device).detach().requires_grad_() for t in strided)
    out, _ = flash(q, k, v, torch.tensor(whole(batch.lengths)))
    # The gradient is expanded, as that of a sum is.
    out.backward(torch.ones((), dtype=heads.dtype, device=device).expand(out.shape))
    assert torch.equal(out.detach().cpu(), expected[0])
    ones = run(device, (batch.q, batch.k, batch.v, torch.ones_like(batch.dout)), whole(batch.lengths))
    for name, t, e in zip("qkv", (q, k, v), ones[2:], strict=True):
        assert torch.equal(t.grad.cpu(), e), name


def test_tasks_of_one_row_and_none_at_all(device: torch.device) -> None:
    heads = HEADS["fp16, one key head"]
    batch = random_batch((9,), heads, 3)
    tensors = batch.q, batch.k, batch.v, batch.dout
    single = run(device, tensors, [(i, i + 1, 0, i + 1) for i in range(9)])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), single, oracle(batch), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-3, atol=5e-3, msg=name)
    out, lse, dq, dk, dv = run(device, tensors, [])
    assert (out == 0).all() and (lse == -math.inf).all() and all((t == 0).all() for t in (dq, dk, dv))
    assert out.shape == batch.dout.shape and lse.shape == batch.q.shape[:2]


@pytest.mark.parametrize("tasks", [whole, cut])
def test_sinks_take_their_share_and_get_their_gradient(device: torch.device, tasks: object) -> None:
    heads = HEADS["bf16"]
    batch, sinks = random_batch(LENGTHS, heads, 4), random_sinks(heads.q, 4)
    exact = eager_attention(batch, torch.float64, 0.0, sinks)
    table = torch.tensor(whole(LENGTHS) if tasks is whole else cut(LENGTHS, 4))
    q, k, v = (t.to(device).detach().requires_grad_() for t in (batch.q, batch.k, batch.v))
    leaf = sinks.to(device).requires_grad_()
    out, lse = flash(q, k, v, table, leaf, scale=heads.dim**-0.5)
    out.backward(batch.dout.to(device))
    for name, t, e in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, q.grad, k.grad, v.grad), exact, strict=False):
        error = (t.detach().cpu().double() - e).square().mean().sqrt() / e.square().mean().sqrt()
        assert error < (1e-6 if name == "lse" else 2.0**-8), (name, error)
    torch.testing.assert_close(leaf.grad.cpu().double(), exact[5], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 0.4])
@pytest.mark.parametrize("tasks", [whole, cut])
def test_any_scale_is_the_textbook_formula(device: torch.device, tasks: object, scale: float) -> None:
    """The kernels set what is not seen to -inf before they multiply by the scale."""
    heads = HEADS["bf16"]
    batch = random_batch(LENGTHS, heads, 6)
    exact = eager_attention(batch, torch.float64, 0.0, None, scale)
    table = whole(LENGTHS) if tasks is whole else cut(LENGTHS, 6)
    ours = run(device, (batch.q, batch.k, batch.v, batch.dout), table, scale=scale)
    for name, mine, e in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=True):
        assert (mine.double() - e).square().mean().sqrt() <= e.square().mean().sqrt() / 128, name


def test_the_gradient_of_sinks_by_aten_is_that_of_the_cpu_kernel_where_a_row_has_no_task(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    out, dout = torch.randn(2, 20, 4, 8, generator=generator)
    lse, sinks = torch.randn(20, 4, generator=generator), torch.randn(4, generator=generator)
    out[7], lse[7] = 0.0, -math.inf
    expected = torch.ops.distca.sink_gradient(dout, out, lse, sinks)
    given = torch.ops.distca.sink_gradient_by_aten(*(t.to(device) for t in (dout, out, lse, sinks)))
    torch.testing.assert_close(given.cpu(), expected)


@pytest.mark.parametrize(
    ("dims", "dtype", "options", "message"),
    [
        ((16, 16), torch.float32, {}, "float32; bfloat16 and float16 are supported"),
        ((16, 24), torch.bfloat16, {}, "head dim 16, v has 24; equal ones"),
        ((16, 16), torch.bfloat16, {"softcap": 3.0}, "softcap = 3; ATen's flash attention has none"),
        ((20, 20), torch.bfloat16, {}, "head dim 20; multiples of 8 from 8 to 512"),
        ((264, 264), torch.bfloat16, {}, "head dim 264; ATen's flash attention has up to 256"),
        ((520, 520), torch.bfloat16, {}, "head dim 520; multiples of 8 from 8 to 512"),
    ],
    ids=["fp32", "values of another dim", "softcap", "dim 20", "dim 264", "dim 520"],
)
def test_what_flash_lacks_is_an_error_that_names_what_is_supported(
    device: torch.device, dims: tuple[int, int], dtype: torch.dtype, options: dict[str, float], message: str
) -> None:
    q, k, v = (
        torch.zeros(4, n, dim, dtype=dtype, device=device) for n, dim in ((2, dims[0]), (1, dims[0]), (1, dims[1]))
    )
    with pytest.raises(RuntimeError, match=f"distca InvalidArgumentError: .*{message}"):
        flash(q, k, v, torch.tensor([[0, 4, 0, 4]]), **options)


@pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
def test_tensors_on_two_devices_are_an_error_that_names_both() -> None:
    q, k, v = torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16, device="cuda").unbind()
    with pytest.raises(distca.InvalidArgumentError, match="k is on cpu, q on cuda:0"):
        distca.attention(q, k.cpu(), v)


def test_the_fake_kernel_promises_what_comes_on_a_gpu() -> None:
    # No graph is built, because a PyTorch without CUDA cannot make one of its tensors.
    with FakeTensorMode():
        q = torch.empty(50, 4, 32, dtype=torch.bfloat16, device="cuda")
        k, v = torch.empty(2, 50, 2, 32, dtype=torch.bfloat16, device="cuda").unbind()
        tasks = torch.zeros(1, 4, dtype=torch.int64)
        out, lse = distca.attention(q, k, v, tasks)
        grads = torch.ops.distca.attention_backward(out, q, k, v, out, lse, tasks)
        assert (out.shape, out.dtype, out.device) == ((50, 4, 32), torch.bfloat16, torch.device("cuda:0"))
        assert (lse.shape, lse.dtype, lse.device) == ((50, 4), torch.float32, torch.device("cuda:0"))
        assert [(t.shape, t.dtype, t.device) for t in grads] == [(t.shape, t.dtype, t.device) for t in (q, k, v)]


def test_the_operator_can_be_compiled(device: torch.device) -> None:
    heads = HEADS["bf16"]
    batch = random_batch((33, 20), heads, 2)
    tensors = batch.q, batch.k, batch.v, batch.dout
    tasks = torch.tensor(cut(batch.lengths, 1))
    expected = run(device, tensors, tasks.tolist())
    q, k, v = (t.to(device).detach().requires_grad_() for t in tensors[:3])
    out = torch.compile(lambda *qkv: flash(*qkv, tasks)[0], fullgraph=True, backend="aot_eager")(q, k, v)
    out.backward(batch.dout.to(device))
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), (expected[0], *expected[2:]), strict=True
    ):
        torch.testing.assert_close(a.detach().cpu(), b, msg=name)
