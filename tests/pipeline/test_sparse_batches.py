"""Pipelines of layers that differ, over micro-batches in which ranks have padding alone, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from distca.pingpong.ping_pong import run_halves
from distca.pipeline import PipelinePlans, Ticks
from distca.planner.halves import join_halves
from support.groups import on_all_ranks
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


def _one_process(microbatch: int, window: int | None, scale: float | None) -> list[torch.Tensor]:
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
            of_document = torch.nn.functional.scaled_dot_product_attention(
                *rows, attn_mask=seen, scale=scale
            ).transpose(0, 1)
            out = torch.cat([out[:at], of_document, out[at + n :]])
        at += n
    if out.requires_grad:
        out.sum().backward()
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)]


def _run(scales: list[float | None]) -> list[list[torch.Tensor]]:
    """With scales, plans say them for each document, which a step without documents has not."""
    kinds: dict[str, Any] = {"windows": WINDOWS}
    if scales[0] is not None:
        of_layers = zip(WINDOWS, scales, strict=True)
        kinds = {"scores": [distca.Scores(window=window, scale=scale, softcap=0.0) for window, scale in of_layers]}
    found: list[Any] = [None] * len(LAYOUTS)
    with distca.init(max_tokens=64, heads=HEADS, timeout=30) as context:
        plans = PipelinePlans(LAYOUTS, HEADS, stages=[[0], [1]], context=context, min_rows=8, **kinds)
        ticks = Ticks(plans, context=context)
        for tick in ticks:
            if tick.work is None:
                tick.serve()
            elif tick.phase == "forward":
                inputs = _inputs(tick.work.microbatch)
                found[tick.work.microbatch] = [
                    distca.core_attention(*inputs, ticks.plan, scale=scales[context.rank])[0],
                    *inputs,
                ]
            else:
                found[tick.work.microbatch][0].sum().backward()
    return [[out.detach(), *(x.grad for x in inputs)] for out, *inputs in found]


@pytest.mark.parametrize("scales", [[None, None], [0.2, 0.5], [0.2, 0.2]], ids=str)
def test_ranks_without_documents_go_through_all_ticks(scales: list[float | None]) -> None:
    for window, scale, of_rank in zip(WINDOWS, scales, launch(_run, scales, ranks=2), strict=True):
        for microbatch, found in enumerate(of_rank):
            for a, b in zip(found, _one_process(microbatch, window, scale), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", [[0.1, 0.2], [0.1, 0.1]], ids=str)
def test_a_half_without_documents_has_the_scales_of_the_layers(scales: list[float]) -> None:
    layout = distca.Layout.from_documents([[40]])
    x = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(1))
    scores = [distca.Scores(scale=scale, softcap=0.0) for scale in scales]
    options: dict[str, Any] = {"stages": [[0], [1]], "layers": 1, "scores": scores, "halves": distca.halves}
    heads = distca.Heads(2, 2, 8)

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        plans = PipelinePlans([layout], heads, rank=rank, **options)
        ticks, leaf, out = Ticks(plans, context=context), x.clone().requires_grad_(), torch.empty(0)
        first, second = plans.halves[0]

        def attend(rows: torch.Tensor, plan: Any) -> torch.Tensor:
            return plan.pad(distca.core_attention(rows, rows, rows, plan, context=context, scale=scales[rank])[0])

        for tick in ticks:
            if tick.work is None:
                tick.serve()
            elif tick.phase == "forward":
                parts = run_halves(attend, (first.take(leaf, 0), ticks.plan), (second.take(leaf, 0), ticks.plan))
                out = join_halves(parts, (first, second), 0)
            else:
                out.square().sum().backward()
        return [out.detach(), leaf.grad]

    contexts = distca.loopback(2, max_tokens=64, heads=heads, timeout=20)
    try:
        found = on_all_ranks(contexts, work)
    finally:
        for context in contexts:
            context.close()
    for scale, of_rank in zip(scales, found, strict=True):
        leaf = x.clone().requires_grad_()
        out, _ = distca.attention(leaf, leaf, leaf, scale=scale)
        out.square().sum().backward()
        for a, b in zip(of_rank, [out, leaf.grad], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
