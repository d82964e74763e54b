"""What the core's tests share: batches, layouts, a float64 oracle, error bounds, and groups of loopback ranks."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import settings

import distca
from distca import testing

Result = TypeVar("Result")

NAN = float("nan")
NAMES = ("out", "lse", "dq", "dk", "dv")
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}

#: One token, primes, shorter than a key block, exactly one, one more, several.
LENGTHS = (1, 97, 64, 1, 211, 7, 65, 2, 128, 63)

#: How the errors of ranks end whose calls do not go together.
ADVICE = (
    "as many calls of core_attention and of its backward on every rank, in the same order; a rank without data passes "
    "zero rows, and a model that is evaluated on one rank alone gets no plan there"
)


def examples(number: int) -> settings:
    """So many random examples of a test, or as many times more as the profile has (`make fuzz`: 20)."""
    return settings(max_examples=number * settings.default.max_examples // 100)


# ---- batches ----


@dataclasses.dataclass(frozen=True)
class Batch:
    """Whole documents one after another, wherever their rows live; gradients of `out` come with them."""

    lengths: tuple[int, ...]
    heads: distca.Heads
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def offsets(self) -> list[int]:
        return [sum(self.lengths[:d]) for d in range(len(self.lengths) + 1)]

    def documents(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        for begin, end in zip(self.offsets, self.offsets[1:], strict=False):
            yield tuple(t[begin:end] for t in tensors)


def random_batch(lengths: Sequence[int], heads: distca.Heads, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    n, d, dv = sum(lengths), heads.dim, heads.value_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(heads.dtype)

    return Batch(
        tuple(lengths), heads, normal(n, heads.q, d), normal(n, heads.kv, d), normal(n, heads.kv, dv),
        normal(n, heads.q, dv),
    )  # fmt: skip


def needle_batch(lengths: Sequence[int], heads: distca.Heads, seed: int) -> tuple[Batch, torch.Tensor]:
    """A batch in which one key dominates every row, and the output that this gives, exactly.

    Each query row and head picks a key that it may see, at random. A value says its document, row (in base 16) and
    key/value head in small integers, so an output tells where it came from.
    """
    random_one = random_batch(lengths, heads, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    signs = torch.randint(0, 2, random_one.k.shape, generator=generator) * 2 - 1
    group = heads.q // heads.kv
    q, v = torch.zeros(random_one.q.shape), torch.zeros(random_one.v.shape)
    expected = torch.zeros(random_one.dout.shape)
    for document, (begin, length) in enumerate(zip(random_one.offsets, lengths, strict=False)):
        row = torch.arange(length)
        for kv_head in range(heads.kv):
            label = torch.stack(
                [torch.full_like(row, document), row // 256, row // 16 % 16, row % 16, torch.full_like(row, kv_head)], 1
            )
            v[begin : begin + length, kv_head] = label.repeat(1, heads.value_dim)[:, : heads.value_dim].float() + 1
        for head in range(heads.q):
            target = begin + (torch.rand(length, generator=generator) * (row + 1)).long()
            q[begin : begin + length, head] = 16.0 * signs[target, head // group]
            expected[begin : begin + length, head] = v[target, head // group]
    dtype = heads.dtype
    return dataclasses.replace(random_one, q=q.to(dtype), k=signs.to(dtype), v=v.to(dtype)), expected.to(dtype)


# ---- layouts: every one is a list of segments for each rank ----


def data_parallel(lengths: Sequence[int], ranks: int, seed: int = 0) -> distca.Layout:
    """Whole documents on random ranks; the documents keep their numbers, the last of several ranks stays empty."""
    rng = random.Random(seed)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        segments[rng.randrange(max(1, ranks - 1))].append((document, 0, length))
    return distca.Layout(segments)


def spill(lengths: Sequence[int], ranks: int, seed: int = 0) -> distca.Layout:
    return distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=-(-sum(lengths) // ranks))


def spill_with_empty_ranks(lengths: Sequence[int], ranks: int, seed: int = 0) -> distca.Layout:
    return distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=-(-sum(lengths) // max(1, ranks - 1)))


def scattered(lengths: Sequence[int], ranks: int, seed: int = 0) -> distca.Layout:
    """Documents cut anywhere, the pieces on random ranks in random order, padding between them."""
    rng = random.Random(seed)
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(4)))})
        for begin, end in zip(cuts, cuts[1:], strict=False):
            segments[rng.randrange(ranks)].append((document, begin, end))
    for of_rank in segments:
        rng.shuffle(of_rank)
        for _ in range(rng.randrange(3)):
            of_rank.insert(rng.randrange(len(of_rank) + 1), (distca.PADDING, 0, rng.choice((1, 5, 64, 70))))
    return distca.Layout(segments)


LAYOUTS: dict[str, Callable[..., distca.Layout]] = {
    "data_parallel": data_parallel,
    "spill": spill,
    "spill_with_empty_ranks": spill_with_empty_ranks,
    "scattered": scattered,
}


def random_tasks(
    layout: distca.Layout, kv_heads: int, seed: int, servers: Sequence[int] | None = None
) -> list[tuple[int, int, int, int, int, int]]:
    """A schedule for `distca.plan(tasks=)`: every document cut at random rows, each piece at random heads."""
    rng = random.Random(seed)
    servers = list(range(layout.num_ranks)) if servers is None else sorted(servers)

    def pieces(size: int, most: int) -> list[tuple[int, int]]:
        cuts = sorted({0, size, *(rng.randrange(size) for _ in range(rng.randrange(most + 1)))})
        return list(zip(cuts, cuts[1:], strict=False))

    tasks = [
        (document, *rows, *heads, rng.choice(servers))
        for document, length in enumerate(layout.document_lengths)
        for rows in pieces(length, 3)
        for heads in pieces(kv_heads, 2)
    ]
    rng.shuffle(tasks)
    return tasks


def source_rows(batch_lengths: Sequence[int], layout: distca.Layout, rank: int) -> torch.Tensor:
    """For each row of a rank its row among all documents; -1 for padding."""
    offsets = [sum(batch_lengths[:d]) for d in range(len(batch_lengths))]
    parts = [
        torch.full((end - begin,), -1) if document < 0 else torch.arange(begin, end) + offsets[document]
        for document, begin, end in layout.segments(rank)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def rows_of_rank(batch: Batch, layout: distca.Layout, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """A rank's rows of a tensor; its padding rows are NaN."""
    source = source_rows(batch.lengths, layout, rank)
    rows = torch.full((len(source), *tensor.shape[1:]), NAN, dtype=tensor.dtype)
    rows[source >= 0] = tensor[source[source >= 0]]
    return rows


def gather(lengths: Sequence[int], layout: distca.Layout, of_ranks: Sequence[torch.Tensor], padding: float) -> Any:
    """The ranks' rows put together in document order; padding rows must have the value `padding`."""
    whole = torch.full((sum(lengths), *of_ranks[0].shape[1:]), NAN, dtype=of_ranks[0].dtype)
    for rank, rows in enumerate(of_ranks):
        source = source_rows(lengths, layout, rank)
        assert rows.shape[0] == len(source)
        assert (rows[source < 0] == padding).all(), f"rank {rank}: padding rows are not {padding}"
        whole[source[source >= 0]] = rows[source >= 0]
    return whole


# ---- references ----


def _with_gradients(
    batch: Batch, dtype: torch.dtype, attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    q, k, v = (t.detach().to(dtype, copy=True).requires_grad_() for t in (batch.q, batch.k, batch.v))
    results = [attend(*rows) for rows in batch.documents(q, k, v)]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    out.backward(batch.dout.to(dtype))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad


def visible(length: int, mask: str = "causal", window: int | None = None) -> torch.Tensor:
    """Boolean [length, length]: which keys each row of a document sees."""
    row, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if mask == "full":
        return torch.ones(length, length, dtype=torch.bool)
    return (key <= row) & (row - key < (window or length))


def oracle(
    batch: Batch, scale: float | None = None, mask: str = "causal", window: int | None = None
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv in float64 from the same rounded inputs: the textbook formula and PyTorch's autograd."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~visible(q.shape[0], mask, window), -math.inf)
        lse = torch.logsumexp(scores, dim=2)
        return torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=2), v), lse.T

    return _with_gradients(batch, torch.float64, attend)


def torch_attention(batch: Batch, mask: str = "causal", window: int | None = None) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv by PyTorch's own fused attention, in the batch's dtype, document by document.

    Its CPU kernel wants Dv = D, so the narrower one of them is filled up with zeros, which changes no result.
    """
    dim = max(batch.heads.dim, batch.heads.value_dim)
    scale = batch.heads.dim**-0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value_dim, gqa = v.shape[2], q.shape[1] != k.shape[1]
        q, k, v = (F.pad(t, (0, dim - t.shape[2])).transpose(0, 1)[None] for t in (q, k, v))
        seen = None if (mask, window) == ("causal", None) else visible(q.shape[2], mask, window)
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=gqa, scale=scale)
        q, k = q.detach(), k.detach().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        added = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)
        lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, k, is_causal=seen is None, attn_mask=added, scale=scale
        )[1]
        return out[0].transpose(0, 1)[..., :value_dim], lse.float().reshape(q.shape[1], q.shape[2]).T

    return _with_gradients(batch, batch.heads.dtype, attend)


class ErrorPool:
    """Errors pooled over batches, and the bound on them: as exact as PyTorch's own attention."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ours: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        self.theirs: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
        self.reference: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}

    def add(
        self, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]
    ) -> None:
        for name, x, y, r in zip(NAMES, ours, theirs, reference, strict=True):
            assert x.shape == y.shape == r.shape, name
            assert x.dtype == (torch.float32 if name == "lse" else self.dtype), name
            self.ours[name].append(x.double().flatten() - r.flatten())
            self.theirs[name].append(y.double().flatten() - r.flatten())
            self.reference[name].append(r.flatten())

    def check(self, factor: float = 1.1) -> None:
        for name in NAMES:
            ours, theirs, reference = (torch.cat(d[name]) for d in (self.ours, self.theirs, self.reference))
            assert len(reference) >= 10_000, f"{name}: {len(reference)} elements are too few for a bound"
            dtype = torch.float32 if name == "lse" else self.dtype
            size, largest = _rms(reference), reference.abs().max().item()
            unit = size if size > 0 else 1.0
            bound = factor * _rms(theirs) / unit + UNIT_ROUNDOFF[dtype] / 8
            error = _rms(ours) / unit
            assert error <= bound, f"{name}: RMS error {error:.3e}, allowed {bound:.3e} (PyTorch {_rms(theirs) / unit})"
            ulp = 2.0 ** (math.floor(math.log2(largest)) - MANTISSA_BITS[dtype]) if largest > 0 else 0.0
            most = 2 * factor / 1.1 * theirs.abs().max().item() + ulp
            assert ours.abs().max().item() <= most, f"{name}: largest error {ours.abs().max():.3e}, allowed {most:.3e}"


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


# ---- ranks ----


@contextmanager
def loopback_group(plans: Sequence[distca.Plan] | distca.Plan, **options: Any) -> Iterator[list[distca.Context]]:
    """Contexts for every rank of these plans: just large enough, arenas NaN before every step, closed at the end."""
    plans = [plans] if isinstance(plans, distca.Plan) else list(plans)
    slot_bytes = max(64, *(p.stats.slot_bytes for p in plans), 0)
    options = {"heap_bytes": 2 * slot_bytes, "timeout": 60.0, "max_tokens": 1} | options
    contexts = testing.loopback(plans[0].layout.num_ranks, heads=plans[0].heads, **options)
    for context in contexts:
        context._core.set_fill_with_nan(True)
    try:
        yield contexts
    finally:
        for context in contexts:
            context.close()


@contextmanager
def ranks_apart(context: distca.Context) -> Iterator[None]:
    """On a GPU: a stream of this thread's own, and its own backward too; in common ones ranks would wait for ever."""
    if context.device == "cpu":
        yield
        return
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(torch.cuda.Stream()):
        yield


def outcomes(
    contexts: Sequence[distca.Context], work: Callable[[int, distca.Context], Result], threads: int = 1
) -> list[Result | BaseException]:
    """What `work(rank, context)` returned or raised on every rank, each in a thread of its own."""
    results: list[Any] = [None] * len(contexts)

    def main(rank: int) -> None:
        torch.set_num_threads(threads)
        try:
            with ranks_apart(contexts[rank]):
                results[rank] = work(rank, contexts[rank])
        except BaseException as error:  # handed to the caller
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
    """What `work(rank, context)` returned on every rank; an error of the first rank that has a cause of its own."""
    results = outcomes(contexts, work, threads)
    errors = [r for r in results if isinstance(r, BaseException)]
    of_another = distca.PeerDiedError | distca.PeerLeftError | distca.PeerTimeoutError
    errors.sort(key=lambda e: isinstance(e, of_another))
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def fault_of_check(context: distca.Context) -> Exception:
    """What `check` raises, once there is something to raise."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            context.check()
        except distca.DistcaError as error:
            return error
        time.sleep(0.001)
    raise AssertionError("no fault is reported")


def run_step(
    batch: Batch, plan: distca.Plan, context: distca.Context, *, fused: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Forward and backward of one rank: its rows of out, lse, dq, dk, dv.

    `fused` makes q, k, v strided views of one projection, with columns between them that are nobody's.
    """
    return tuple(t.cpu() for t in _run_step(batch, plan, context, fused, scale))


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
    """The ranks' out, lse and, where there are any, dq, dk, dv in document order, padding checked."""
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
    """out, lse, dq, dk, dv of the whole batch in document order, computed by a loopback group of its own."""
    with loopback_group(plan, reorder_seed=reorder_seed, **options) as contexts:
        results = on_all_ranks(
            contexts, lambda rank, context: run_step(batch, plan, context, fused=fused, scale=scale), threads
        )
    return together(batch.lengths, plan.layout, results)
