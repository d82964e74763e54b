"""The largest logits by the textbook formula, and what the ranks of a group return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import distca
from support.batches import Batch, rows_of_rank
from support.groups import loopback_group, on_all_ranks
from support.oracle import Ranges, visible

Options = dict[str, Any]


def largest_logits(
    batch: Batch,
    scale: float | None = None,
    softcap: float = 0.0,
    mask: str = "causal",
    window: int | None = None,
    bidirectional: Any = None,
) -> torch.Tensor:
    """``[T, H]`` in float64: the largest logit that each row sees, by the textbook formula."""
    rows = []
    for document, (q, k) in enumerate(batch.documents(batch.q.double(), batch.k.double())):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        ranges: Ranges = (bidirectional or {}).get(document, ())
        rows.append(scores.masked_fill(~visible(len(q), mask, window, ranges), -math.inf).amax(2).T)
    return torch.cat(rows)


def largest_of_rank(batch: Batch, layout: distca.Layout, rank: int, largest: torch.Tensor) -> torch.Tensor:
    """The largest logits of a rank's rows. Padding, which is NaN here, has none."""
    rows = rows_of_rank(batch, layout, rank, largest).nan_to_num(-math.inf)
    return torch.cat([torch.full((1, largest.shape[1]), -math.inf, dtype=rows.dtype), rows]).amax(0)


def of_steps(
    batch: Batch, plans: Sequence[distca.Plan], call: Callable[..., Any], group: Options | None = None, **options: Any
) -> list[list[Any]]:
    """What ``call(q, k, v, plan, ...)`` returned for each plan, by rank."""

    def work(rank: int, context: distca.Context) -> list[Any]:
        rows = [rows_of_rank(batch, plans[0].layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return [call(*rows, plan.for_rank(rank), context=context, **options) for plan in plans]

    with loopback_group(plans, **(group or {})) as contexts:
        results = on_all_ranks(contexts, work)
        for context in contexts:
            context.check()
    return [list(of_plan) for of_plan in zip(*results, strict=True)]
