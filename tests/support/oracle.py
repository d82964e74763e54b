"""Attention in float64 by PyTorch, and how far a result may be from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from support.batches import Batch

NAMES = ("out", "lse", "dq", "dk", "dv")

#: Ranges of a document's rows that see each other, and those of each document that has any.
Ranges = Sequence[tuple[int, int]]
Bidirectional = Mapping[int, Ranges] | None


UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def _with_gradients(
    batch: Batch,
    dtype: torch.dtype,
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    bidirectional: Bidirectional,
) -> tuple[torch.Tensor, ...]:
    q, k, v = (t.detach().to(dtype, copy=True).requires_grad_() for t in (batch.q, batch.k, batch.v))
    results = [attend(*rows, (bidirectional or {}).get(d, ())) for d, rows in enumerate(batch.documents(q, k, v))]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    out.backward(batch.dout.to(dtype))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad


def visible(length: int, mask: str = "causal", window: int | None = None, bidirectional: Ranges = ()) -> torch.Tensor:
    """Boolean [length, length]: the keys that each row of a document sees. If "chunked", a chunk has `window` rows.
    Rows of each range of `bidirectional` see those after them in it, too.
    """
    row, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if bidirectional:
        seen = visible(length, mask, window)
        for begin, end in bidirectional:
            seen[begin:end, begin:end] |= torch.ones(end - begin, end - begin, dtype=torch.bool).triu()
        return seen
    if mask == "full":
        return (row - key).abs() < (window or length)
    if mask == "chunked":
        return (key <= row) & (row // (window or length) == key // (window or length))
    return (key <= row) & (row - key < (window or length))


def oracle(
    batch: Batch,
    scale: float | None = None,
    mask: str = "causal",
    window: int | None = None,
    bidirectional: Bidirectional = None,
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv in float64 from the same rounded inputs, by the textbook formula and PyTorch's
    autograd.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~visible(q.shape[0], mask, window, ranges), -math.inf)
        lse = torch.logsumexp(scores, dim=2)
        return torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=2), v), lse.T

    return _with_gradients(batch, torch.float64, attend, bidirectional)


def torch_attention(
    batch: Batch, mask: str = "causal", window: int | None = None, bidirectional: Bidirectional = None
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv of PyTorch's own fused attention in the batch's dtype, document by document.

    Its CPU kernel wants Dv = D, so the narrower one is filled up with zeros, which changes no result.
    """
    dim = max(batch.heads.dim, batch.heads.value_dim)
    scale = batch.heads.dim**-0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
        value_dim, gqa = v.shape[2], q.shape[1] != k.shape[1]
        q, k, v = (F.pad(t, (0, dim - t.shape[2])).transpose(0, 1)[None] for t in (q, k, v))
        is_causal = (mask, window) == ("causal", None) and not ranges
        seen = None if is_causal else visible(q.shape[2], mask, window, ranges)
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=gqa, scale=scale)
        q, k = q.detach(), k.detach().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        added = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)
        lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, k, is_causal=seen is None, attn_mask=added, scale=scale
        )[1]
        return out[0].transpose(0, 1)[..., :value_dim], lse.float().reshape(q.shape[1], q.shape[2]).T

    return _with_gradients(batch, batch.heads.dtype, attend, bidirectional)


class ErrorPool:
    """Errors pooled over batches, and the bound on them: results must be as exact as PyTorch's own attention."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ours: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        self.theirs: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        self.reference: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}

    def add(
        self, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
    ) -> None:
        for name, x, y, r in zip(NAMES, ours, theirs, reference, strict=True):
            assert x.shape == y.shape == r.shape, name
            assert x.dtype == (torch.float32 if name == "lse" else self.dtype), name
            self.ours[name].append(x.double().flatten() - r.flatten())
            self.theirs[name].append(y.double().flatten() - r.flatten())
            self.reference[name].append(r.flatten())

    def check(self, factor: float = 1.1) -> None:
        for name in NAMES:
            ours, theirs, reference = (torch.cat(d[name]) for d in (self.ours, self.theirs, self.reference))
            assert len(reference) >= 10_000, f"{name}: {len(reference)} elements are too few for a bound"
            dtype = torch.float32 if name == "lse" else self.dtype
            size, largest = _rms(reference), reference.abs().max().item()
            unit = size if size > 0 else 1.0
            bound = factor * _rms(theirs) / unit + UNIT_ROUNDOFF[dtype] / 8
            error = _rms(ours) / unit
            assert error <= bound, f"{name}: RMS error {error:.3e}, allowed {bound:.3e} (PyTorch {_rms(theirs) / unit})"
            ulp = 2.0 ** (math.floor(math.log2(largest)) - MANTISSA_BITS[dtype]) if largest > 0 else 0.0
            most = 2 * factor / 1.1 * theirs.abs().max().item() + ulp
            assert ours.abs().max().item() <= most, f"{name}: largest error {ours.abs().max():.3e}, allowed {most:.3e}"


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()
