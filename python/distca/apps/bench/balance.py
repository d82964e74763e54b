"""`distca bench balance`: an attention step of two ranks with loads 1.6 : 0.4, balanced, unbalanced, and by peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import distca
from distca import _C
from distca.apps.bench.harness import Result, Row
from distca.apps.bench.peers import AllGather, AllToAll
from distca.apps.common.timing import alternate, median_ratio, seconds

# Causal pairs are 4 : 1; loads are therefore 1.6 and 0.4 times the mean.
LENGTHS = [[4096], [2048]]
HEADS = distca.Heads(q=8, kv=2, dim=64)
BF16_HEADS = distca.Heads(q=8, kv=2, dim=64, dtype=torch.bfloat16)
IDEAL = 0.625


class Times(NamedTuple):
    """Seconds of each round on one rank."""

    balanced: list[float]
    unbalanced: list[float]
    all_gather: list[float]
    all_to_all: list[float]
    together: list[float]
    alone: list[float]
    balanced_bf16: list[float]
    unbalanced_bf16: list[float]


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward on two single-threaded processes. The time of a step is that of the slowest rank."""
    rounds = rounds or (3 if short else 9)
    times, moved = distca.launch(_run_rank, rounds, ranks=2, threads=1)[0]
    return Result(
        "balance",
        [
            Row(
                "balanced / unbalanced step, median of pairs",
                median_ratio(times.balanced, times.unbalanced),
                "x",
                at_most=0.75,
            ),
            Row("the same, if moving rows cost nothing", IDEAL, "x"),
            Row("all-gather context parallelism / balanced step", median_ratio(times.all_gather, times.balanced), "x"),
            Row("all-to-all (Ulysses) / balanced step", median_ratio(times.all_to_all, times.balanced), "x"),
            Row("local attention on both ranks at once / on one", median_ratio(times.together, times.alone), "x"),
            Row("bfloat16: balanced / unbalanced step", median_ratio(times.balanced_bf16, times.unbalanced_bf16), "x"),
            Row("balanced step, bfloat16 / float32", median_ratio(times.balanced_bf16, times.balanced), "x"),
            Row("bytes moved in a step", moved / 1e6, "MB"),
        ],
        {
            "lengths": LENGTHS,
            "heads": [HEADS.q, HEADS.kv, HEADS.dim],
            "dtype": "float32, but for the rows that name bfloat16",
            "cpu_kernel_bf16": _C.cpu_isa(),
            "rounds": rounds,
            "peers": "tokens spread evenly, the same local kernel, collectives by gloo on one host",
        },
    )


def _run_rank(rounds: int) -> tuple[Times, int]:
    layout = distca.Layout.from_documents(LENGTHS)
    rows = layout.num_rows(dist.get_rank())
    lengths = layout.document_lengths
    with ExitStack() as stack:
        steps = []
        for heads in (HEADS, BF16_HEADS):
            init = distca.init(max_tokens=max(map(sum, LENGTHS)), heads=heads, name=f"bench/balance-{heads.dtype}")
            context = stack.enter_context(init)
            q, k, v = _inputs(rows, heads.dtype)
            plans = [
                distca.plan(layout, heads, context=context, tolerance=0.01, balance=balance)
                for balance in (True, False)
            ]
            steps += [partial(_step, partial(_attend, plan, context), q, k, v) for plan in plans]
            if heads is HEADS:
                moved = sum(plans[0].stats.bytes.values())
        steps += [partial(_step, peer, *_inputs(peer.num_rows)) for peer in (AllGather(lengths), AllToAll(lengths))]
        of_steps = alternate([_between_barriers(step) for step in steps], rounds)
        small = [t.detach() for t in _inputs(min(map(sum, LENGTHS)))]
        local = partial(distca.attention, *small)
        works = [_between_barriers(local), _between_barriers(local if dist.get_rank() == 0 else lambda: None)]
        together, alone = alternate(works, rounds)
    balanced, unbalanced, balanced_bf16, unbalanced_bf16, all_gather, all_to_all = of_steps
    return Times(balanced, unbalanced, all_gather, all_to_all, together, alone, balanced_bf16, unbalanced_bf16), moved


def _inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    q = torch.randn(rows, HEADS.q, HEADS.dim, generator=generator)
    k, v = torch.randn(2, rows, HEADS.kv, HEADS.dim, generator=generator)
    return tuple(t.to(dtype).requires_grad_() for t in (q, k, v))


def _attend(
    plan: distca.Plan, context: distca.Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return distca.core_attention(q, k, v, plan, context=context)[0]


def _step(attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out = attend(q, k, v)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def _between_barriers(work: Callable[[], object]) -> Callable[[], float]:
    """Makes all ranks start together. A call is over when the last rank has ended."""

    def call() -> float:
        dist.barrier()
        return seconds(lambda: (work(), dist.barrier()))

    return call
