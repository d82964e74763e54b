"""`distca bench balance`: one attention step of two ranks with loads 1.6 : 0.4, balanced and not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import distca
from distca.bench.harness import Result, Row, alternate, median_ratio, seconds

# Causal pairs 4 : 1, so loads of 1.6 and 0.4 times the mean.
LENGTHS = [[4096], [2048]]
HEADS = distca.Heads(q=8, kv=2, dim=64)
IDEAL = 0.625


def run(rounds: int = 9) -> Result:
    """Forward and backward on two single-threaded processes; the time of a step is that of the slowest rank."""
    per_rank = distca.launch(_run_rank, rounds, ranks=2, threads=1)
    balanced, unbalanced, together, alone, moved = per_rank[0]
    return Result(
        "balance",
        [
            Row("balanced / unbalanced step, median of pairs", median_ratio(balanced, unbalanced), "x", at_most=0.75),
            Row("the same, if moving rows cost nothing", IDEAL, "x"),
            Row("local attention on both ranks at once / on one", median_ratio(together, alone), "x"),
            Row("bytes moved in a step", moved / 1e6, "MB"),
        ],
        {"lengths": LENGTHS, "heads": [HEADS.q, HEADS.kv, HEADS.dim], "dtype": "float32", "rounds": rounds},
    )


def _run_rank(rounds: int) -> tuple[list[float], list[float], list[float], list[float], int]:
    layout = distca.Layout.from_documents(LENGTHS)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    rows = layout.num_rows(rank)
    q = torch.randn(rows, HEADS.q, HEADS.dim, generator=generator, requires_grad=True)
    k, v = torch.randn(2, rows, HEADS.kv, HEADS.dim, generator=generator).unbind()
    with distca.init(max_tokens=max(map(sum, LENGTHS)), heads=HEADS):
        plans = [distca.plan(layout, HEADS, tolerance=0.01, balance=balance) for balance in (True, False)]

        def step(plan: distca.Plan) -> None:
            out, _ = distca.core_attention(q, k, v, plan)
            out.backward(torch.ones_like(out))

        balanced, unbalanced = alternate([_between_barriers(partial(step, plan)) for plan in plans], rounds)
        small = [t[: min(map(sum, LENGTHS))].detach() for t in (q, k, v)]
        local = partial(distca.attention, *small)
        works = [_between_barriers(local), _between_barriers(local if rank == 0 else lambda: None)]
        together, alone = alternate(works, rounds)
    return balanced, unbalanced, together, alone, sum(plans[0].stats.bytes.values())


def _between_barriers(work: Callable[[], object]) -> Callable[[], float]:
    """All ranks start together, and a call is over when the last has ended."""

    def call() -> float:
        dist.barrier()
        return seconds(lambda: (work(), dist.barrier()))

    return call
