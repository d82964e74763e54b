"""Attention of a problem by PyTorch: in float64, and as exact as a fused kernel can be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distca.apps.verify.cases import Case, Document, Inputs


class Results(NamedTuple):
    """What attention returns, and the gradients of its inputs."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None

    def terms_of_dsinks(self, inputs: Inputs) -> torch.Tensor:
        """What is summed up over rows, ``[rows, query heads]``: the share of a sink times -delta."""
        assert inputs.sinks is not None
        delta = (self.out * inputs.dout).sum(2) - (0 if inputs.dlse is None else inputs.dlse)
        return -torch.exp(inputs.sinks - self.lse) * delta


def _scale(case: Case) -> float:
    return case.heads.dim**-0.5 if case.scale is None else case.scale


def _of_heads(rows: torch.Tensor, q_heads: int) -> torch.Tensor:
    """``[rows, kv heads, dim]`` as ``[query heads, rows, dim]``."""
    return rows.repeat_interleave(q_heads // rows.shape[1], dim=1).transpose(0, 1)


def _scores(case: Case, queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``[query heads, rows, keys]``; -inf where a row does not see a key."""
    scores = queries @ keys.transpose(1, 2) * _scale(case)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return scores.masked_fill(~visible, -math.inf)


def largest_logits(case: Case, inputs: Inputs) -> torch.Tensor:
    """The largest score of each row and query head, ``[rows, query heads]``, in float64."""
    q, k = (t.double() for t in inputs[:2])
    largest = [
        _scores(case, q[own].transpose(0, 1), _of_heads(k[keys], q.shape[1]), visible).amax(2).T
        for own, keys, visible in case.documents()
    ]
    return torch.cat(largest)


def exact(case: Case, inputs: Inputs) -> Results:
    """The textbook formula in float64, with PyTorch's autograd."""
    q, k, v = (t.double().requires_grad_() for t in inputs[:3])
    sinks = None if inputs.sinks is None else inputs.sinks.double().requires_grad_()
    outs, lses = [], []
    for own, keys, visible in case.documents():
        queries, seen_k, seen_v = q[own].transpose(0, 1), _of_heads(k[keys], q.shape[1]), _of_heads(v[keys], q.shape[1])
        scores = _scores(case, queries, seen_k, visible)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
        lse = torch.logsumexp(scores, dim=2)
        probs = torch.exp(scores - lse[..., None])[..., : len(keys)]
        outs.append((probs @ seen_v).transpose(0, 1))
        lses.append(lse.T)
    out, lse = torch.cat(outs), torch.cat(lses)
    dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()
    torch.autograd.backward([out, lse], [inputs.dout.double(), dlse])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    dsinks = None if sinks is None else sinks.grad
    return Results(out.detach(), lse.detach(), q.grad, k.grad, v.grad, dsinks)


def rounded(case: Case, inputs: Inputs) -> Results:
    """The same in fp32, with weights and the gradients of scores rounded to the inputs' dtype before they are
    multiplied, as kernels on matrix units have to round them.
    """
    dtype, q_heads, kv_heads = inputs.q.dtype, inputs.q.shape[1], inputs.k.shape[1]
    q, k, v, dout = (t.float() for t in inputs[:4])
    out, dq, dk, dv = (torch.zeros_like(t) for t in (dout, q, k, v))
    lse = torch.zeros(q.shape[:2])
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks)

    def in_dtype(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype).float()

    def add_heads(total: torch.Tensor, document: Document, of_heads: torch.Tensor) -> None:
        rows = of_heads.transpose(0, 1).reshape(-1, kv_heads, q_heads // kv_heads, of_heads.shape[2]).sum(2)
        total.index_add_(0, document.keys, rows)

    for document in case.documents():
        own, keys, visible = document
        queries, douts = q[own].transpose(0, 1), dout[own].transpose(0, 1)
        seen_k, seen_v = _of_heads(k[keys], q_heads), _of_heads(v[keys], q_heads)
        scores = queries @ seen_k.transpose(1, 2) * _scale(case)
        slopes = torch.ones(())
        if case.softcap:
            tanh = torch.tanh(scores / case.softcap)
            scores, slopes = case.softcap * tanh, 1 - tanh * tanh
        scores = scores.masked_fill(~visible, -math.inf)
        largest = scores.amax(2, keepdim=True)
        weights = torch.exp(scores - largest)
        total = weights.sum(2, keepdim=True)
        if inputs.sinks is not None:
            total = total + torch.exp(inputs.sinks[:, None, None] - largest)
        result = in_dtype(in_dtype(weights) @ seen_v / total)
        lse_of = largest + total.log()
        out[own], lse[own] = result.transpose(0, 1), lse_of[..., 0].T
        delta = (result * douts).sum(2, keepdim=True)
        if inputs.dlse is not None:
            delta = delta - inputs.dlse[own].T[..., None]
        probs = torch.exp(scores - lse_of)
        dscores = in_dtype(probs * (douts @ seen_v.transpose(1, 2) - delta) * slopes)
        dq[own] = (dscores @ seen_k * _scale(case)).transpose(0, 1)
        add_heads(dk, document, dscores.transpose(1, 2) @ queries * _scale(case))
        add_heads(dv, document, in_dtype(probs).transpose(1, 2) @ douts)
        if dsinks is not None and inputs.sinks is not None:
            dsinks -= (torch.exp(inputs.sinks[:, None, None] - lse_of) * delta).sum((1, 2))
    return Results(out, lse, in_dtype(dq), in_dtype(dk), in_dtype(dv), dsinks)
