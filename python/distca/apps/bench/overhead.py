"""`distca bench overhead`: what the plan, the protocol and the dispatcher add if nothing needs to move."""

from __future__ import annotations

import torch

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import alternate, median_ratio

ROWS, HEADS, DIM = 8192, 8, 64


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward `core_attention` of one rank, in turns with the local kernel on the same rows."""
    pairs = rounds or (10 if short else 30)
    heads = distca.Heads(q=HEADS, kv=HEADS, dim=DIM)
    q, k, v = torch.randn(3, ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    with distca.init(transport="loopback", max_tokens=ROWS, heads=heads, name="bench/overhead") as context:
        plan = distca.plan(distca.Layout.from_documents([[ROWS]]), heads, context=context)
        ours, local = alternate(
            [lambda: distca.core_attention(q, k, v, plan, context=context), lambda: distca.attention(q, k, v)], pairs
        )
    return Result(
        "overhead",
        [
            Row("core_attention / local attention, median of pairs", median_ratio(ours, local), "x", at_most=1.03),
            Row("local attention, median", sorted(local)[len(local) // 2] * 1e3, "ms"),
        ],
        {"rows": ROWS, "heads": HEADS, "dim": DIM, "dtype": "float32", "pairs": pairs},
    )
