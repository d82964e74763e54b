"""Softcap and sinks of the local kernel, and values at the ends of what numbers can hold."""

from __future__ import annotations

import math

import pytest
import torch

import distca
from support import LENGTHS, NAMES, Batch, ErrorPool, oracle, random_batch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FEATURES = {"softcap": (5.0, False), "sinks": (0.0, True), "both": (3.0, True)}


def _tasks(lengths: tuple[int, ...]) -> torch.Tensor:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return torch.tensor([[e - n, e, e - n, e] for e, n in zip(ends, lengths, strict=True)], dtype=torch.int64)


def _sinks(heads: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(heads, generator=torch.Generator().manual_seed(seed))


def _ours(
    batch: Batch, tasks: torch.Tensor, softcap: float, sinks: torch.Tensor | None, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv and, where there are sinks, their gradient."""
    q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    out, lse = distca.attention(q, k, v, tasks, sinks, scale=scale, softcap=softcap)
    out.backward(batch.dout)
    return out.detach(), lse, q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])


def _eager(
    batch: Batch, dtype: torch.dtype, softcap: float, sinks: torch.Tensor | None, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """The textbook's formulas and PyTorch's autograd, in `dtype`; the sink is a column of P that is dropped."""
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in (batch.q, batch.k, batch.v))
    leaf = None if sinks is None else sinks.to(dtype, copy=True).requires_grad_()
    outs, lses = [], []
    for dq, dk, dv in batch.documents(q, k, v):
        group, rows = dq.shape[1] // dk.shape[1], dq.shape[0]
        dk, dv = (t.repeat_interleave(group, dim=1) for t in (dk, dv))
        scores = torch.einsum("ihd,jhd->hij", dq, dk) * (dq.shape[2] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), -math.inf)
        if leaf is not None:
            scores = torch.cat([scores, leaf[:, None, None].expand(-1, rows, 1)], dim=2)
        probs = torch.softmax(scores, dim=2)[:, :, :rows]
        outs.append(torch.einsum("hij,jhd->ihd", probs, dv))
        lses.append(torch.logsumexp(scores.float() if dtype != torch.float64 else scores, dim=2).T)
    out = torch.cat(outs)
    out.backward(batch.dout.to(dtype))
    grads = [t.grad for t in (q, k, v, *([] if leaf is None else [leaf]))]
    return out.detach(), torch.cat(lses).detach(), *grads


def check_features(heads: distca.Heads, softcap: float, with_sinks: bool) -> None:
    pool = ErrorPool(heads.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        sinks = _sinks(heads.q, seed) if with_sinks else None
        ours = _ours(batch, _tasks(batch.lengths), softcap, sinks)
        exact = _eager(batch, torch.float64, softcap, sinks)
        pool.add(ours[:5], _eager(batch, heads.dtype, softcap, sinks)[:5], exact[:5])
        if with_sinks:
            # A sum over rows of values as exact as out: its own bound is the rounding of out and dout.
            rounding = 2e-6 if heads.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours[5].double(), exact[5], rtol=rounding, atol=20 * rounding)
    # PyTorch has no fused kernel for these. Its unfused gradients take delta from P, not from the rounded output as
    # fused kernels must: in fp32 that is worth a fifth of dq's error, with or without these features.
    pool.check(1.4 if heads.dtype == torch.float32 else 1.1)


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", [(8, 2, 64, None), (6, 2, 24, 40)], ids=str)
def test_softcap_and_sinks_are_as_exact_as_pytorch(
    shape: tuple[int, int, int, int | None], feature: str, dtype: torch.dtype
) -> None:
    check_features(distca.Heads(*shape, dtype=dtype), *FEATURES[feature])


@DTYPES
def test_softcap_and_sinks_give_the_same_bits_whatever_the_tasks_and_the_threads(dtype: torch.dtype) -> None:
    batch = random_batch((300, 97), distca.Heads(4, 2, 24, dtype=dtype), 1)
    sinks = _sinks(4, 1)
    torch.set_num_threads(1)
    whole = _ours(batch, _tasks(batch.lengths), 7.0, sinks)
    cuts = [0, 1, 63, 64, 130, 201, 300]
    tasks = [[b, e, 0, e] for b, e in zip(cuts, cuts[1:], strict=False)] + [[300, 333, 300, 333], [333, 397, 300, 397]]
    torch.set_num_threads(3)
    pieces = _ours(batch, torch.tensor(tasks[::-1]), 7.0, sinks)
    for name, a, b in zip((*NAMES, "dsinks"), pieces, whole, strict=True):
        if name not in ("dk", "dv"):  # sums over query rows follow the tasks
            assert torch.equal(a, b), name


def test_a_negative_scale_goes_together_with_a_softcap() -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16), 2)
    ours = _ours(batch, _tasks(batch.lengths), 2.0, None, scale=-0.4)
    for name, a, b in zip(NAMES, ours, _eager(batch, torch.float64, 2.0, None, scale=-0.4), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_a_sink_of_any_size_takes_nothing_or_all(sink: float) -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16), 3)
    tasks = _tasks(batch.lengths)
    with_sink = _ours(batch, tasks, 0.0, torch.full((2,), sink))
    if sink < 0:
        for name, a, b in zip(NAMES, with_sink, _ours(batch, tasks, 0.0, None), strict=False):
            assert torch.equal(a, b), name
    else:
        assert (with_sink[1] == sink).all()
        assert all((t == 0).all() for t in (with_sink[0], *with_sink[2:]))


def test_rows_of_no_task_give_a_sink_nothing() -> None:
    batch = random_batch((40, 30), distca.Heads(2, 1, 16), 4)
    batch.q[40:] = math.nan
    got = _ours(batch, _tasks((40,)), 0.0, _sinks(2, 4))
    alone = Batch((40,), batch.heads, batch.q[:40], batch.k[:40], batch.v[:40], batch.dout[:40])
    torch.testing.assert_close(
        got[5].double(), _eager(alone, torch.float64, 0.0, _sinks(2, 4))[5], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [({"softcap": -1.0}, "softcap = -1"), ({"softcap": math.nan}, "softcap"), ({"sinks": torch.zeros(3)}, "[3]")],
    ids=["negative", "nan", "shape"],
)
def test_a_softcap_or_sinks_that_make_no_sense_are_refused(options: dict[str, object], said: str) -> None:
    batch = random_batch((8,), distca.Heads(2, 1, 8), 5)
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.attention(batch.q, batch.k, batch.v, **options)
    assert said in str(caught.value)


# ---- values at the ends ----


@DTYPES
def test_keys_with_a_score_of_minus_infinity_take_no_part(dtype: torch.dtype) -> None:
    """Nor do rows that see no other keys come out as NaN: their out is 0 and their lse -inf."""
    batch = random_batch((150,), distca.Heads(2, 1, 16, dtype=dtype), 6)
    batch.q[..., 0] = 1.0
    hidden = torch.zeros(150, dtype=torch.bool)
    hidden[[0, 1, 2, 64, 70, 71, 149]] = True
    batch.k[hidden, :, 0] = -math.inf
    out, lse = distca.attention(batch.q, batch.k, batch.v)
    assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all()
    # A row that sees every key before it attends to those that are left.
    q, k, v = (t.double() for t in (batch.q[148:149], batch.k[:149][~hidden[:149]], batch.v[:149][~hidden[:149]]))
    probs = torch.softmax(torch.einsum("ihd,jgd->hij", q, k) / 4, dim=2)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out[148:149].double(), torch.einsum("hij,jgd->ihd", probs, v), rtol=rounding, atol=rounding
    )


@DTYPES
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_ten_thousand_overflow_nothing(sign: float, dtype: torch.dtype) -> None:
    batch = random_batch((130,), distca.Heads(2, 1, 16, dtype=dtype), 7)
    batch.q[...] = sign * 100.0
    batch.k[...] = 25.0 * (1 + torch.arange(130) % 2)[:, None, None]  # logits of 1e4 and 2e4
    for name, a, b in zip(NAMES, _ours(batch, _tasks((130,)), 0.0, None), oracle(batch), strict=True):
        assert a.isfinite().all(), name
        if name in ("out", "lse", "dv"):
            # dv follows the rounding of the log-sum-exp that is handed over, 2e4 * 2^-24.
            rounding = 2e-2 if dtype == torch.bfloat16 else 2e-3 if name == "dv" else 1e-5
            torch.testing.assert_close(a.double(), b, rtol=rounding, atol=rounding)


@DTYPES
def test_subnormal_numbers_are_numbers_or_nothing(dtype: torch.dtype) -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16, dtype=dtype), 8)
    small = Batch(batch.lengths, batch.heads, *(t * 1e-39 for t in (batch.q, batch.k, batch.v, batch.dout)))
    for name, a, b in zip(NAMES, _ours(small, _tasks((70,)), 0.0, None), oracle(small), strict=True):
        # A subnormal operand may count as zero.
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-37, msg=lambda text, name=name: f"{name}: {text}")
