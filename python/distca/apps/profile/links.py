"""What it takes to bring rows and gradients to other ranks of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import distca
from distca.testing import _emulation

#: Bytes of rows that ranks put to their neighbours, and of one row.
PUT_BYTES, ROW_BYTES = 1 << 24, 1024
#: Bytes that ranks gather or add up.
REDUCED = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
#: Collectives of a measurement, and rows of the square products before, between and after them.
REPEATS, PRODUCT_ROWS = 4, 512
#: Calls of core attention whose overhead is measured.
CALLS = 20
WORD = 0  # of the signals; all are free, because the context takes no steps


def puts(rounds: int) -> tuple[float, float]:
    """Bytes a second at which all ranks put rows to their neighbours at the same time, and seconds of a single row."""
    target = (dist.get_rank() + 1) % dist.get_world_size()
    with distca.init(
        max_tokens=1, heads=distca.Heads(1, 1, 8), heap_bytes=2 * PUT_BYTES, name="profile/put"
    ) as context:
        rows = torch.ones(PUT_BYTES, dtype=torch.uint8)
        core = context._core
        assert core is not None

        def put(number: int) -> None:
            _emulation.send_rows(core, target, rows.data_ptr(), number, ROW_BYTES, WORD, 1)
            _emulation.quiet(core)

        whole = _between_barriers(partial(put, PUT_BYTES // ROW_BYTES), rounds)
        one = _between_barriers(partial(put, 1), rounds)
    return PUT_BYTES / whole, one


def collectives(rounds: int) -> list[dict[str, Any]]:
    """The rate of rings by what they do and the bytes that each rank sends in one. An all-reduce is two of them.

    Ranks compute before and after each collective, as in a step. A thread of gloo whose core computes then waits for
    the core, which takes longer than a small collective on idle ranks.
    """
    ranks, table = dist.get_world_size(), []
    factors = torch.randn(2, PRODUCT_ROWS, PRODUCT_ROWS)
    product = partial(torch.matmul, *factors, out=torch.empty_like(factors[0]))
    computing = _between_barriers(partial(_in_turns, product), rounds)
    # Versions of PyTorch that have the newer names deprecate the older ones.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for num_bytes in REDUCED:
        part = torch.ones(num_bytes // 4 // ranks)
        whole = torch.ones(ranks * part.numel())
        sent = 4 * (ranks - 1) * part.numel()
        for what, rings, collective in (
            ("all_reduce", 2, partial(dist.all_reduce, whole)),
            ("all_gather", 1, partial(all_gather, whole, part)),
            ("reduce_scatter", 1, partial(reduce_scatter, part, whole)),
        ):
            both = _between_barriers(partial(_in_turns, product, collective), rounds)
            alone = _between_barriers(collective, rounds)
            seconds = max(alone, (both - computing) / REPEATS)
            table.append({"what": what, "bytes": sent, "bandwidth": rings * sent / seconds})
    return table


def _in_turns(product: Callable[[], Any], collective: Callable[[], Any] | None = None) -> None:
    """Computes a product, and then a collective and a product in turns."""
    product()
    for _ in range(REPEATS):
        if collective is not None:
            collective()
        product()


def call_overhead(rounds: int) -> float:
    """Seconds of a call of core attention in which there is nearly nothing to compute and nothing to move."""
    heads = distca.Heads(q=2, kv=1, dim=64)
    layout = distca.Layout.from_documents([[16]] * dist.get_world_size())
    q, k, v = (torch.randn(16, n, 64).requires_grad_() for n in (2, 1, 1))
    with distca.init(max_tokens=16, heads=heads, name="profile/call") as context:
        plan = distca.plan(layout, heads, context=context)

        def calls() -> None:
            outs = [distca.core_attention(q, k, v, plan, context=context)[0] for _ in range(CALLS)]
            for out in reversed(outs):
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        return _between_barriers(calls, rounds) / (2 * CALLS)


def _between_barriers(work: Callable[[], Any], rounds: int) -> float:
    """The median of the seconds of `work`, which all ranks begin together. A first call is not counted."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
