"""The same steps taken whole, in parts, and with the parts of two steps in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import distca
from support.batches import LENGTHS, Batch, rows_of_rank, spill

HEADS = distca.Heads(4, 2, 16, 24)


def spilled_plan(ranks: int = 2) -> distca.Plan:
    """A plan that balances documents which run over from one rank to the next."""
    return distca.plan(spill(LENGTHS, ranks), HEADS, tolerance=0.0, min_rows=1)


class Rows:
    """A rank's rows of a batch, and everything that is computed from them."""

    def __init__(self, batch: Batch, plan: distca.Plan, context: distca.Context, **options: Any) -> None:
        self.plan, self.context, self.options = plan.for_rank(context.rank), context, options
        self.q, self.k, self.v, self.dout = (
            rows_of_rank(batch, plan.layout, context.rank, t) for t in (batch.q, batch.k, batch.v, batch.dout)
        )
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()
        if "sinks" in options:
            self.options["sinks"] = options["sinks"].clone().requires_grad_()
        self.out = self.lse = torch.empty(0)

    def whole(self) -> None:
        self.out, self.lse = distca.core_attention(
            self.q, self.k, self.v, self.plan, context=self.context, **self.options
        )

    def dispatch(self) -> distca.Step:
        return distca.dispatch(self.q, self.k, self.v, self.plan, context=self.context, **self.options)

    def collect(self, step: distca.Step) -> None:
        self.out, self.lse = distca.collect(step)

    def in_parts(self) -> None:
        step = self.dispatch()
        distca.attend(step)
        self.collect(step)

    def loss(self) -> torch.Tensor:
        return (self.out.float() * self.dout.nan_to_num().float()).sum()

    def results(self) -> list[torch.Tensor]:
        sinks = self.options.get("sinks")
        grads = [self.q.grad, self.k.grad, self.v.grad, *([] if sinks is None else [sinks.grad])]
        return [t.nan_to_num().clone() for t in (self.out.detach(), self.lse, *grads)]


def both(batches: Sequence[tuple[Batch, distca.Plan, dict[str, Any]]]) -> Callable[[distca.Context], list[Rows]]:
    return lambda context: [Rows(batch, plan, context, **options) for batch, plan, options in batches]


def whole_steps(rows: list[Rows]) -> list[torch.Tensor]:
    for one in rows:
        one.whole()
    sum(one.loss() for one in rows).backward()
    return [result for one in rows for result in one.results()]


def overlapped_steps(rows: list[Rows]) -> list[torch.Tensor]:
    steps = [one.dispatch() for one in rows]
    for step in steps:
        distca.attend(step)
    for one, step in zip(rows, steps, strict=True):
        one.collect(step)
    sum(one.loss() for one in rows).backward()
    return [result for one in rows for result in one.results()]


def steps_in_parts(rows: list[Rows]) -> list[torch.Tensor]:
    for one in rows:
        one.in_parts()
    sum(one.loss() for one in rows).backward()
    return [result for one in rows for result in one.results()]
