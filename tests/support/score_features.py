"""Softcap and sinks: attention with both written out, and the tensors that tests compare."""

from __future__ import annotations

import math

import torch

import distca
from support.batches import LENGTHS, Batch, random_batch
from support.local_tasks import whole_documents
from support.oracle import ErrorPool, visible


def random_sinks(heads: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(heads, generator=torch.Generator().manual_seed(seed))


def with_ours(
    batch: Batch, tasks: torch.Tensor, softcap: float, sinks: torch.Tensor | None, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk, dv and, if there are sinks, their gradient."""
    q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    out, lse = distca.attention(q, k, v, tasks, sinks, scale=scale, softcap=softcap)
    out.backward(batch.dout)
    return out.detach(), lse, q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])


def eager_attention(
    batch: Batch,
    dtype: torch.dtype,
    softcap: float,
    sinks: torch.Tensor | None,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
    mask: str = "causal",
    window: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention by the textbook formula and PyTorch's autograd, in `dtype`. A sink is a column of P that is dropped.

    Returns out, lse, dq, dk, dv and, if there are sinks, their gradient; also for a gradient `dlse` of lse.
    """
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in (batch.q, batch.k, batch.v))
    leaf = None if sinks is None else sinks.to(dtype, copy=True).requires_grad_()
    outs, lses = [], []
    for dq, dk, dv in batch.documents(q, k, v):
        group, rows = dq.shape[1] // dk.shape[1], dq.shape[0]
        dk, dv = (t.repeat_interleave(group, dim=1) for t in (dk, dv))
        scores = torch.einsum("ihd,jhd->hij", dq, dk) * (dq.shape[2] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible(rows, mask, window), -math.inf)
        if leaf is not None:
            scores = torch.cat([scores, leaf[:, None, None].expand(-1, rows, 1)], dim=2)
        probs = torch.softmax(scores, dim=2)[:, :, :rows]
        outs.append(torch.einsum("hij,jhd->ihd", probs, dv))
        lses.append(torch.logsumexp(scores.float() if dtype != torch.float64 else scores, dim=2).T)
    out = torch.cat(outs)
    lse = torch.cat(lses)
    if dlse is None:
        out.backward(batch.dout.to(dtype))
    else:
        torch.autograd.backward([out, lse], [batch.dout.to(dtype), dlse.to(lse.dtype)])
    grads = [t.grad for t in (q, k, v, *([] if leaf is None else [leaf]))]
    return out.detach(), lse.detach(), *grads


def check_features(heads: distca.Heads, softcap: float, with_sinks: bool) -> None:
    pool = ErrorPool(heads.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        sinks = random_sinks(heads.q, seed) if with_sinks else None
        ours = with_ours(batch, whole_documents(batch.lengths), softcap, sinks)
        exact = eager_attention(batch, torch.float64, softcap, sinks)
        pool.add(ours[:5], eager_attention(batch, heads.dtype, softcap, sinks)[:5], exact[:5])
        if with_sinks:
            # This is a sum over rows of values that are as exact as out. Its own bound is the rounding of out and dout.
            rounding = 2e-6 if heads.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours[5].double(), exact[5], rtol=rounding, atol=20 * rounding)
    # PyTorch has no fused kernel for these. Its unfused gradients take delta from P, but fused kernels must take it
    # from the rounded output, and P from the rounded lse. In fp32 that makes a third of dq's error, with or without
    # these features. (30 batches: 1.42 at most.)
    pool.check(1.5 if heads.dtype == torch.float32 else 1.1)
