"""Batches of documents, and layouts that say where their rows lie."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import settings

import distca

NAN = float("nan")


#: Lengths of documents: one token, primes, shorter than a key block, exactly one, one row more, and several blocks.
LENGTHS = (1, 97, 64, 1, 211, 7, 65, 2, 128, 63)


def examples(number: int) -> settings:
    """Settings for this number of random examples, multiplied as the profile says (`make fuzz`: by 20)."""
    return settings(max_examples=number * settings.default.max_examples // 100)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Whole documents one after another, wherever their rows live, and gradients of `out`."""

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
    """A batch in which one key dominates every row, and its exact output.

    Each query row and head picks at random a key that it may see. A value holds its document, its row (in base 16) and
    its key/value head as small integers, so that an output tells where it came from.
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


def data_parallel(lengths: Sequence[int], ranks: int, seed: int = 0) -> distca.Layout:
    """Whole documents on random ranks; documents keep their numbers, and the last of several ranks stays empty."""
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
    """Documents cut at random rows. The pieces lie on random ranks in random order, with padding between them."""
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


def random_tasks(
    layout: distca.Layout, kv_heads: int, seed: int, servers: Sequence[int] | None = None
) -> list[tuple[int, int, int, int, int, int]]:
    """A schedule for `distca.plan(tasks=)`: every document is cut at random rows, and each piece at random heads."""
    rng = random.Random(seed)
    servers = list(range(layout.num_ranks)) if servers is None else sorted(servers)

    def pieces(begin: int, end: int, most: int) -> list[tuple[int, int]]:
        cuts = sorted({begin, end, *(rng.randrange(begin, end) for _ in range(rng.randrange(most + 1)))})
        return list(zip(cuts, cuts[1:], strict=False))

    tasks = [
        (document, *rows, *heads, rng.choice(servers))
        for document, own in enumerate(layout._own_rows())
        for rows in pieces(own.start, own.stop, 3)
        for heads in pieces(0, kv_heads, 2)
    ]
    rng.shuffle(tasks)
    return tasks


def random_ranges(
    lengths: Sequence[int], seed: int, firsts: Sequence[int] | None = None
) -> dict[int, list[tuple[int, int]]]:
    """Ranges of every kind: prefixes, whole documents, single rows, ranges that touch, and none. None begins before the
    first own row of its document, of `firsts`.
    """
    draw = random.Random(seed)
    found: dict[int, list[tuple[int, int]]] = {}
    for document, length in enumerate(lengths):
        if draw.random() < 0.2:
            continue
        ranges, row = [], 0 if firsts is None else firsts[document]
        while row < length:
            row += draw.choice([0, 0, 1, 7, 40, 130])
            end = min(length, row + draw.choice([1, 2, 30, 64, 65, 200]))
            if row < end:
                ranges.append((row, end))
            row = end
        found[document] = ranges
    return found


def source_rows(batch_lengths: Sequence[int], layout: distca.Layout, rank: int) -> torch.Tensor:
    """The row among all documents of each row of a rank; -1 for padding."""
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
    """Puts the ranks' rows together in document order. Padding rows must have the value `padding`."""
    whole = torch.full((sum(lengths), *of_ranks[0].shape[1:]), NAN, dtype=of_ranks[0].dtype)
    for rank, rows in enumerate(of_ranks):
        source = source_rows(lengths, layout, rank)
        assert rows.shape[0] == len(source)
        assert (rows[source < 0] == padding).all(), f"rank {rank}: padding rows are not {padding}"
        whole[source[source >= 0]] = rows[source >= 0]
    return whole


LAYOUTS: dict[str, Callable[..., distca.Layout]] = {
    "data_parallel": data_parallel,
    "spill": spill,
    "spill_with_empty_ranks": spill_with_empty_ranks,
    "scattered": scattered,
}
"""Functions that make layouts, by name."""
