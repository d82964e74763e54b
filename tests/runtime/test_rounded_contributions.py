"""Contributions to key gradients that travel in the dtype of the heads, compared with PyTorch in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, Batch, random_batch, random_tasks, scattered, spill
from support.groups import compute
from support.oracle import NAMES, ErrorPool, oracle

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
HEADS = distca.Heads(8, 4, 24, 40)


def _homes(plan: distca.Plan, batch: Batch) -> torch.Tensor:
    """The rank that holds each row of the batch."""
    homes = torch.empty(sum(batch.lengths), dtype=torch.int64)
    for rank in range(plan.layout.num_ranks):
        for document, begin, end in plan.layout.segments(rank):
            if document >= 0:
                homes[batch.offsets[document] + begin : batch.offsets[document] + end] = rank
    return homes


def _errors_of_rounding(plan: distca.Plan, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What dk and dv lose if each server's contribution to rows of other homes is rounded once where there are several.

    What a server contributes are the gradients if only its own rows have a gradient.
    """
    dtype, group = batch.heads.dtype, batch.heads.q // batch.heads.kv
    homes, parts = _homes(plan, batch), []
    for server in range(plan.layout.num_ranks):
        dout = torch.zeros_like(batch.dout)
        for task in plan.tasks:
            if task.server != server:
                continue
            rows = slice(batch.offsets[task.document] + task.q_begin, batch.offsets[task.document] + task.q_end)
            heads = slice(task.kv_head_begin * group, task.kv_head_end * group)
            dout[rows, heads] = batch.dout[rows, heads]
        parts.append(oracle(dataclasses.replace(batch, dout=dout))[3:])

    def lost(terms: list[torch.Tensor]) -> torch.Tensor:
        several = sum((term != 0).any(-1).to(torch.int64) for term in terms) > 1
        total = torch.zeros_like(terms[0])
        for server, term in enumerate(terms):
            rounded = several & (homes != server)[:, None]
            total += rounded[..., None] * (term.to(dtype).double() - term)
        return total

    return lost([dk for dk, _ in parts]), lost([dv for _, dv in parts])


def _at_home(heads: distca.Heads, seed: int, **options: Any) -> distca.Plan:
    """Gradients of eight servers, which come home in rounds."""
    return distca.plan(spill((700,), 8), heads, balance=False, **options)


def _anywhere(heads: distca.Heads, seed: int, **options: Any) -> distca.Plan:
    layout = scattered(LENGTHS, 3, seed)
    return distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed), overlap=True, **options)


@DTYPES
@pytest.mark.parametrize("make", [_at_home, _anywhere])
def test_sums_are_as_exact_as_one_rounding_of_each_contribution_allows(
    make: Callable[..., distca.Plan], dtype: torch.dtype
) -> None:
    shape = dataclasses.replace(HEADS, dtype=dtype)
    pool = ErrorPool(dtype)
    for seed in (1, 2):
        plan = make(shape, seed, reduce_dtype=dtype)
        batch = random_batch(plan.layout.document_lengths, shape, seed)
        ours, usual = (compute(batch, p, reorder_seed=seed, fused=True) for p in (plan, make(shape, seed)))
        for name, a, b in zip(NAMES, ours, usual, strict=True):
            assert torch.equal(a, b) == (name in ("out", "lse", "dq")), name
        lost = _errors_of_rounding(plan, batch)
        assert all(error.abs().max() > 0 for error in lost)
        gradients = (wide.double() + error for wide, error in zip(usual[3:], lost, strict=True))
        pool.add(ours, (*usual[:3], *gradients), oracle(batch))
    pool.check()


@DTYPES
def test_what_one_server_alone_contributes_has_the_same_bits(dtype: torch.dtype) -> None:
    shape = dataclasses.replace(HEADS, dtype=dtype)
    layout = distca.Layout.from_documents([[300, 40], [7]])
    tasks = [(0, 0, 300, 0, 4, 1), (1, 0, 40, 0, 4, 0), (2, 0, 7, 0, 4, 0)]
    batch = random_batch(layout.document_lengths, shape, 3)
    narrow, wide = (
        compute(batch, distca.plan(layout, shape, tasks=tasks, reduce_dtype=one)) for one in (dtype, torch.float32)
    )
    for name, a, b in zip(NAMES, narrow, wide, strict=True):
        assert torch.equal(a, b), name


def _same_in_all_ways(ways: dict[str, Any], plan: distca.Plan, batch: Batch) -> None:
    first, *others = (compute(batch, plan, **options) for options in ways.values())
    for other in others:
        for name, a, b in zip(NAMES, first, other, strict=True):
            assert torch.equal(a, b), name


@DTYPES
def test_they_are_the_same_bits_in_every_run_and_on_streams(dtype: torch.dtype) -> None:
    shape = dataclasses.replace(HEADS, dtype=dtype)
    plan = distca.plan(spill((900, 30), 5), shape, min_rows=1, tolerance=0.0, reduce_dtype=dtype)
    ways = {"usual": {}, "threads": {"threads": 3}, "late": {"reorder_seed": 5}, "streams": {"streams": True}}
    _same_in_all_ways(ways, plan, random_batch((900, 30), shape, 4))
