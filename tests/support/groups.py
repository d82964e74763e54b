"""Groups of ranks that are threads of one process, and steps on them."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

import distca
from distca import testing
from distca.connect.row_exchange import Meeting, ThreadRows
from distca.testing import _emulation
from support.batches import NAN, Batch, gather, rows_of_rank
from support.oracle import NAMES

Result = TypeVar("Result")


#: The end of an error's message if the calls of ranks differ.
ADVICE = (
    "make the same calls of core_attention and of its backward on every rank, in the same order; a rank without data "
    "passes zero rows, and a model that is evaluated on one rank alone gets no plan there"
)


@functools.cache
def _start_kernels(heads: distca.Heads, attention: str | None) -> None:
    """Starts the GPU's kernels once before ranks share them: CUDA may wait for the whole device where a kernel needs
    more local memory than those before, and a rank then would wait for another that waits for it. Heads that cannot be
    computed are left to the test.
    """
    layout = distca.Layout.from_documents([[8]])
    shapes = ((heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim))
    q, k, v = (torch.zeros(8, *shape, device="cuda", dtype=heads.dtype, requires_grad=True) for shape in shapes)
    with (
        contextlib.suppress(distca.InvalidArgumentError),
        distca.loopback(1, max_tokens=8, heads=heads, device="cuda", attention=attention)[0] as context,
    ):
        for mask, window in (("causal", None), ("causal", 4), ("full", None), ("full", 3)):
            plan = distca.plan(layout, heads, mask=mask, window=window)
            distca.core_attention(q, k, v, plan, context=context)[0].sum().backward()
    torch.cuda.synchronize()


@contextmanager
def loopback_group(plans: Sequence[distca.Plan] | distca.Plan, **options: Any) -> Iterator[list[distca.Context]]:
    """Contexts for every rank of these plans. Heaps are just large enough, arenas are NaN before every step, and
    contexts are closed at the end.
    """
    plans = [plans] if isinstance(plans, distca.Plan) else list(plans)
    if options.get("device", "cpu") != "cpu" and torch.cuda.is_available():
        _start_kernels(plans[0].heads, options.get("attention"))
    slot_bytes = max(64, *(p.stats.slot_bytes for p in plans), 0)
    options = {"heap_bytes": 2 * slot_bytes, "timeout": 60.0, "max_tokens": 1} | options
    contexts = testing.loopback(plans[0].layout.num_ranks, heads=plans[0].heads, **options)
    for context in contexts:
        _emulation.fill_with_nan(context._core)
    try:
        yield contexts
    finally:
        for context in contexts:
            context.close()


@contextmanager
def ranks_apart(context: distca.Context) -> Iterator[None]:
    """On a GPU, gives this thread its own stream and its own backward; with common ones ranks would wait for ever."""
    if context.device == "cpu":
        yield
        return
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(torch.cuda.Stream()):
        yield


def on_the_host(tensors: Iterable[torch.Tensor], context: distca.Context) -> tuple[torch.Tensor, ...]:
    """Copies of a rank's results on the host. The rank waits for its stream first: while a copy from a GPU waits, CUDA
    lets no other thread of the process queue anything, such as the rows that the copied results need.
    """
    if context.device != "cpu":
        torch.cuda.current_stream().synchronize()
    return tuple(t.detach().cpu() for t in tensors)


def outcomes(
    contexts: Sequence[distca.Context], work: Callable[[int, distca.Context], Result], threads: int = 1
) -> list[Result | BaseException]:
    """What `work(rank, context)` returned or raised on every rank. Each rank runs in its own thread."""
    results: list[Any] = [None] * len(contexts)

    def main(rank: int) -> None:
        torch.set_num_threads(threads)
        try:
            with ranks_apart(contexts[rank]):
                results[rank] = work(rank, contexts[rank])
        except BaseException as error:  # the caller gets it
            results[rank] = error

    ranks = [threading.Thread(target=main, args=(rank,)) for rank in range(len(contexts))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return results


def on_all_ranks(
    contexts: Sequence[distca.Context], work: Callable[[int, distca.Context], Result], threads: int = 1
) -> list[Result]:
    """What `work(rank, context)` returned on every rank. If ranks failed, raises the error of the first that has a
    cause of its own.
    """
    results = outcomes(contexts, work, threads)
    errors = [r for r in results if isinstance(r, BaseException)]
    of_another = distca.PeerDiedError | distca.PeerLeftError | distca.PeerTimeoutError
    errors.sort(key=lambda e: isinstance(e, of_another))
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def fault_of_check(context: distca.Context) -> Exception:
    """The error that `check` raises as soon as there is one."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            context.check()
        except distca.DistcaError as error:
            return error
        time.sleep(0.001)
    raise AssertionError("no fault is reported")


def forward_of_rank(plan: distca.Plan, batch: Batch, rank: int, context: distca.Context) -> torch.Tensor:
    """Runs forward of one rank and returns its rows of out."""
    q, k, v = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v))
    return distca.core_attention(q, k, v, plan.for_rank(rank), context=context)[0]


def run_step(
    batch: Batch, plan: distca.Plan, context: distca.Context, *, fused: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Runs forward and backward of one rank and returns its rows of out, lse, dq, dk and dv.

    With `fused`, q, k and v are strided views of one projection, whose columns between them belong to nobody.
    """
    return on_the_host(_run_step(batch, plan, context, fused, scale), context)


def _run_step(
    batch: Batch, plan: distca.Plan, context: distca.Context, fused: bool, scale: float | None
) -> tuple[torch.Tensor, ...]:
    rank, layout, heads = context.rank, plan.layout, batch.heads
    q, k, v, dout = (
        rows_of_rank(batch, layout, rank, t).to(context.device) for t in (batch.q, batch.k, batch.v, batch.dout)
    )
    if not fused:
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, scale=scale)
        out.backward(dout)
        assert q.grad is not None and k.grad is not None and v.grad is not None
        return out.detach(), lse.detach(), q.grad, k.grad, v.grad
    rows = len(q)
    gap = torch.full((rows, 3), NAN, dtype=heads.dtype, device=context.device)
    projection = torch.cat([gap, q.flatten(1), gap, k.flatten(1), v.flatten(1), gap], dim=1).requires_grad_()
    widths = [3, heads.q * heads.dim, 3, heads.kv * heads.dim, heads.kv * heads.value_dim, 3]
    parts = projection.split(widths, dim=1)
    q, k, v = (
        part.unflatten(1, (number, -1))
        for part, number in ((parts[1], heads.q), (parts[3], heads.kv), (parts[4], heads.kv))
    )
    out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, scale=scale)
    out.backward(dout)
    assert projection.grad is not None
    grads = projection.grad.split(widths, dim=1)
    dq, dk, dv = (
        part.unflatten(1, (number, -1))
        for part, number in ((grads[1], heads.q), (grads[3], heads.kv), (grads[4], heads.kv))
    )
    return out.detach(), lse.detach(), dq, dk, dv


def together(
    lengths: Sequence[int], layout: distca.Layout, of_ranks: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """The ranks' out, lse and, if there are any, dq, dk and dv in document order. Padding is checked."""
    return tuple(
        gather(lengths, layout, parts, -math.inf if name == "lse" else 0.0)
        for name, parts in zip(NAMES, zip(*of_ranks, strict=True), strict=False)
    )


def compute(
    batch: Batch,
    plan: distca.Plan,
    *,
    threads: int = 1,
    reorder_seed: int | None = None,
    fused: bool = False,
    scale: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv of the whole batch in document order, computed by a loopback group of its own."""
    with loopback_group(plan, reorder_seed=reorder_seed, **options) as contexts:
        results = on_all_ranks(
            contexts, lambda rank, context: run_step(batch, plan, context, fused=fused, scale=scale), threads
        )
    return together(batch.lengths, plan.layout, results)


def on_threads(ranks: int, work: Callable[[int, ThreadRows], Result]) -> list[Result]:
    """The results of ranks that are threads and exchange rows, without contexts."""
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(lambda rank: work(rank, ThreadRows(meeting, rank, 20.0)), range(ranks)))
