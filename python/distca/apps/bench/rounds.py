"""`distca bench rounds`: what rows in rounds hide of the traffic of a single stream, over an emulated link.

Two ranks, of which one lends about half of its documents to the other. Steps with plans of several rounds take turns
with steps whose rows go at once. The rate of the link follows from the time of a step without it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import Work, alternate, median_ratio, spread

HEADS = distca.Heads(q=8, kv=2, dim=64, dtype=torch.bfloat16)
LENGTHS = [[1024] * 10 + [512] * 8, [256] * 4]
#: Time of the traffic on the busier direction of the link, over the time of a step without it.
SHARES = (0.3, 0.6, 0.9)
LATENCY = 20e-6
ONE_ROUND = 2**40


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of one layer, on two ranks of one thread each."""
    turns = rounds or (5 if short else 15)
    shares = SHARES[1:2] if short else SHARES
    measured: dict[float, list[list[float]]] = distca.launch(_run_rank, shares, turns, ranks=2, threads=1)[0]
    rows, details = list[Row](), dict[float, Any]()
    for share, (at_once, in_rounds) in measured.items():
        name = f"traffic {share:g} of a step without a link"
        rows.append(Row(f"{name}: step in rounds / rows at once", median_ratio(in_rounds, at_once), "x"))
        details[share] = {"at_once": at_once, "in_rounds": in_rounds, "spread": [spread(at_once), spread(in_rounds)]}
    plan = distca.plan(distca.Layout.from_documents(LENGTHS), HEADS)
    used = 1 + max(task.round for task in plan.tasks)
    about = {"lengths": LENGTHS, "heads": [8, 2, 64], "dtype": "bfloat16", "latency": LATENCY, "rounds_of_rows": used}
    return Result("rounds", rows, {**about, "turns": turns, "seconds": details})


def _run_rank(shares: tuple[float, ...], turns: int) -> dict[float, list[list[float]]]:
    layout = distca.Layout.from_documents(LENGTHS)
    rank = dist.get_rank()
    q, k, v, dout = (
        torch.randn(layout.num_rows(rank), heads, HEADS.dim, generator=torch.Generator().manual_seed(rank)).to(
            HEADS.dtype
        )
        for heads in (HEADS.q, HEADS.kv, HEADS.kv, HEADS.q)
    )
    rows = [one.requires_grad_() for one in (q, k, v)]

    def step(plan: distca.Plan, context: distca.Context) -> None:
        out, _ = distca.core_attention(q, k, v, plan, context=context)
        torch.autograd.grad(out, rows, dout)
        dist.barrier()  # both ranks take the time of the slower one

    def times(link: distca.Link | None, *round_bytes: int | None) -> list[list[float]]:
        name = "bench/rounds" if link is None else f"bench/rounds/{link.bytes_per_second:.0f}"
        with distca.init(
            max_tokens=layout.num_rows(0), heads=HEADS, heap_bytes=1 << 27, name=name, link=link
        ) as context:
            plans = [distca.plan(layout, HEADS, context=context, round_bytes=one) for one in round_bytes]
            works: list[Work] = [partial(step, plan, context) for plan in plans]
            return alternate(works, turns)

    stats = distca.plan(layout, HEADS).stats
    busier = max(
        stats.bytes["forward_in"] + stats.bytes["backward_in"], stats.bytes["forward_out"] + stats.bytes["backward_out"]
    )
    alone = torch.tensor(sorted(times(None, ONE_ROUND)[0])[turns // 2])
    dist.broadcast(alone, 0)
    return {
        share: times(distca.Link(bytes_per_second=busier / (share * float(alone)), latency=LATENCY), ONE_ROUND, None)
        for share in shares
    }
