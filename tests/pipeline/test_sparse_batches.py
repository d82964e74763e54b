"""Pipelines of layers that differ, over micro-batches in which ranks have padding alone, or nothing."""

from __future__ import annotations

from typing import Any

import torch

import distca
from distca.pipeline import PipelinePlans, Ticks
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)
WINDOWS = [16, None]  # of the two stages' layers
LAYOUTS = [
    distca.Layout([[(0, 0, 40), (distca.PADDING, 0, 8)]]),
    distca.Layout([[(distca.PADDING, 0, 6)]]),
    distca.Layout([[]]),
    distca.Layout([[(distca.PADDING, 0, 2), (0, 0, 30)]]),
]


def _inputs(microbatch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    rows = LAYOUTS[microbatch].num_rows(0)
    return [torch.randn(rows, heads, 8, generator=generator).requires_grad_() for heads in (2, 1, 1)]


def _one_process(microbatch: int, window: int | None) -> list[torch.Tensor]:
    """out and the gradients of its sum by PyTorch, of the micro-batch's document alone."""
    q, k, v = inputs = _inputs(microbatch)
    out = torch.zeros_like(q)
    at = 0
    for document, begin, end in LAYOUTS[microbatch].segments(0):
        n = end - begin
        if document != distca.PADDING:
            distance = torch.arange(n)[:, None] - torch.arange(n)
            seen = (distance >= 0) & (distance < (window or n))
            rows = [x[at : at + n].transpose(0, 1) for x in (q, k.expand(-1, 2, -1), v.expand(-1, 2, -1))]
            of_document = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=seen).transpose(0, 1)
            out = torch.cat([out[:at], of_document, out[at + n :]])
        at += n
    if out.requires_grad:
        out.sum().backward()
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)]


def _run() -> list[list[torch.Tensor]]:
    found: list[Any] = [None] * len(LAYOUTS)
    with distca.init(max_tokens=64, heads=HEADS, timeout=30) as context:
        plans = PipelinePlans(LAYOUTS, HEADS, stages=[[0], [1]], windows=WINDOWS, context=context, min_rows=8)
        ticks = Ticks(plans, context=context)
        for tick in ticks:
            if tick.work is None:
                tick.serve()
            elif tick.phase == "forward":
                inputs = _inputs(tick.work.microbatch)
                found[tick.work.microbatch] = [distca.core_attention(*inputs, ticks.plan)[0], *inputs]
            else:
                found[tick.work.microbatch][0].sum().backward()
    return [[out.detach(), *(x.grad for x in inputs)] for out, *inputs in found]


def test_ranks_without_documents_go_through_all_ticks() -> None:
    for window, of_rank in zip(WINDOWS, launch(_run, ranks=2), strict=True):
        for microbatch, found in enumerate(of_rank):
            for a, b in zip(found, _one_process(microbatch, window), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
