"""Two ranks whose calls are refused, and a check that the contexts still work afterwards."""

from __future__ import annotations

import torch

import distca
from support.batches import Batch, random_batch, rows_of_rank, spill
from support.groups import on_all_ranks, run_step, together
from support.oracle import oracle

HEADS = distca.Heads(4, 2, 16, 24)
LENGTHS = (100, 3, 64)
LAYOUT = spill(LENGTHS, 2)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plan_of_two(layout: distca.Layout = LAYOUT, heads: distca.Heads = HEADS, **options: object) -> distca.Plan:
    """A plan for two ranks that moves as many tasks as balance asks for."""
    return distca.plan(layout, heads, **({"tolerance": 0.0, "min_rows": 1} | options))  # type: ignore[arg-type]


class Group:
    """Two ranks, a good plan, and a check that they still compute."""

    def __init__(self, contexts: list[distca.Context], plan: distca.Plan) -> None:
        self.contexts, self.plan = contexts, plan
        self.batch: Batch = random_batch(LENGTHS, HEADS, 1)
        self.reference = oracle(self.batch)

    def inputs(self, rank: int = 0) -> Tensors:
        q, k, v = (rows_of_rank(self.batch, LAYOUT, rank, t) for t in (self.batch.q, self.batch.k, self.batch.v))
        return q, k, v

    def attend(self, inputs: Tensors, plan: distca.Plan, **options: object) -> None:
        """Calls core attention on rank 0; rank 1 refuses as many calls as rank 0 has refused."""
        mine, other = (context._core for context in self.contexts)
        try:
            distca.core_attention(*inputs, plan, context=self.contexts[0], **options)  # type: ignore[arg-type]
        finally:
            while other.num_calls < mine.num_calls:
                other.refuse("as on rank 0")

    def check_still_works(self) -> None:
        assert [context.step for context in self.contexts] == [0, 0], "a refused call took a step"
        results = on_all_ranks(self.contexts, lambda rank, context: run_step(self.batch, self.plan, context))
        for a, b in zip(together(LENGTHS, LAYOUT, results), self.reference, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
