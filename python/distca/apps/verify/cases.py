"""Problems that `distca verify` computes: documents, their masks and scores, and layouts and schedules of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from distca.heads import Heads
from distca.planner.layout import PADDING, Layout
from distca.planner.plan import Plan
from distca.planner.planning import plan

#: Lengths around those of the kernels' blocks of rows and keys, and single rows.
LENGTHS = (1, 127, 300, 64, 129, 2, 513, 65, 1, 200)


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: what it is about.
        heads: the heads.
        lengths: of each document the rows of its own.
        mask, window: as in `distca.plan`.
        scale, softcap: as in `distca.core_attention`.
        has_sinks: whether each head has a sink.
        has_dlse: whether lse has a gradient.
        spread: the standard deviation of q. Scores vary as much, if the scale is the default one.
        bidirectional: documents and the ranges of their rows that see each other, as in `Layout.with_bidirectional`.
        branches: documents and the rows of others, (document, begin, end), that each begins with, as in `Layout`; but
            rows are counted from the first own one of theirs.
        retain_bytes, reduce_dtype: as in `distca.plan`; they count where ranks exchange rows.
    """

    name: str
    heads: Heads
    lengths: tuple[int, ...] = LENGTHS
    mask: str = "causal"
    window: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    has_dlse: bool = False
    spread: float = 1.0
    bidirectional: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    branches: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...] = ()
    retain_bytes: int = 0
    reduce_dtype: torch.dtype = torch.float32

    @property
    def num_rows(self) -> int:
        """Rows of all documents."""
        return sum(self.lengths)

    def first_row(self, document: int) -> int:
        """The first row that is the document's own."""
        return sum(end - begin for _, begin, end in dict(self.branches).get(document, ()))

    def documents(self) -> Iterator[Document]:
        """The documents, with the numbers of their rows among those of the whole problem."""
        firsts = [sum(self.lengths[:d]) for d in range(len(self.lengths))]
        for d, length in enumerate(self.lengths):
            begins = dict(self.branches).get(d, ())
            keys = [firsts[of] + row for of, begin, end in (*begins, (d, 0, length)) for row in range(begin, end)]
            rows = slice(firsts[d], firsts[d] + length)
            yield Document(rows, torch.tensor(keys), self._visible(d, len(keys) - length, length))

    def _visible(self, document: int, first: int, length: int) -> torch.Tensor:
        row, key = torch.arange(first, first + length)[:, None], torch.arange(first + length)[None, :]
        if self.mask == "full":
            return (row - key).abs() < (self.window or first + length)
        seen = key <= row
        for begin, end in dict(self.bidirectional).get(document, ()):
            seen |= (begin <= row) & (row < end) & (begin <= key) & (key < end)
        return seen if self.window is None else seen & (row - key < self.window)

    def layout(self, ranks: int, seed: int) -> Layout:
        """Where the rows lie: on one rank one document after another; on several, cut at random rows, on random ranks
        in random order, with padding between them.
        """
        draw = random.Random(seed)
        segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        for d, length in enumerate(self.lengths):
            for begin, end in _cut(draw, self.first_row(d), self.first_row(d) + length, 3 if ranks > 1 else 0):
                segments[draw.randrange(ranks)].append((d, begin, end))
        if ranks > 1:
            for of_rank in segments:
                draw.shuffle(of_rank)
                of_rank.insert(draw.randrange(len(of_rank) + 1), (PADDING, 0, draw.choice((1, 5, 64))))
        branches = {
            document: [(of, self.first_row(of) + begin, self.first_row(of) + end) for of, begin, end in begins]
            for document, begins in self.branches
        }
        layout = Layout(segments, branches=branches)
        return layout.with_bidirectional(dict(self.bidirectional)) if self.bidirectional else layout

    def plan(self, ranks: int, seed: int) -> Plan:
        """A plan in which random ranks compute random rows and heads of every document."""
        draw = random.Random(-1 - seed)
        tasks = [
            (d, *rows, *heads, draw.randrange(ranks))
            for d, length in enumerate(self.lengths)
            for rows in _cut(draw, self.first_row(d), self.first_row(d) + length, 3)
            for heads in _cut(draw, 0, self.heads.kv, 1)
        ]
        return plan(
            self.layout(ranks, seed),
            self.heads,
            mask=self.mask,
            window=self.window,
            tasks=tasks,
            retain_bytes=self.retain_bytes,
            reduce_dtype=self.reduce_dtype,
        )


class Document(NamedTuple):
    """Rows of a document: its own as a slice, those of its keys, and a bool ``[own rows, keys]`` of what is seen."""

    own: slice
    keys: torch.Tensor
    visible: torch.Tensor


def _cut(draw: random.Random, begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Cuts a range at up to `most` random places."""
    cuts = sorted({begin, end, *(draw.randrange(begin, end) for _ in range(draw.randrange(most + 1)))})
    return list(zip(cuts, cuts[1:], strict=False))


class Inputs(NamedTuple):
    """Tensors of a problem, with the rows of all documents one after another."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    sinks: torch.Tensor | None

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same with all tensors of rows changed, so all but sinks."""
        q, k, v, dout = (change(t) for t in self[:4])
        return Inputs(q, k, v, dout, None if self.dlse is None else change(self.dlse), self.sinks)


def random_inputs(case: Case, seed: int) -> Inputs:
    """Normally distributed tensors on the host; the same ones in every process."""
    generator, heads, n = torch.Generator().manual_seed(seed), case.heads, case.num_rows

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(n, heads.q, heads.dim) * case.spread
    k, v = normal(n, heads.kv, heads.dim), normal(n, heads.kv, heads.value_dim)
    dout, dlse, sinks = normal(n, heads.q, heads.value_dim), normal(n, heads.q), 2 * normal(heads.q)
    q, k, v, dout = (t.to(heads.dtype) for t in (q, k, v, dout))
    return Inputs(q, k, v, dout, dlse if case.has_dlse else None, sinks if case.has_sinks else None)


def all_shapes(dtype: torch.dtype) -> list[Case]:
    """Dimensions of heads and ways to share keys that models have; one long document; more of the largest heads."""
    largest = Heads(4, 1, 512, dtype=dtype)
    shapes = [
        Heads(6, 1, 128),
        Heads(2, 2, 192, 128),
        Heads(4, 1, 256),
        Heads(3, 3, 80),
        Heads(2, 1, 96),
    ]
    return [
        *(Case("documents", replace(heads, dtype=dtype)) for heads in shapes),
        Case("one long document", Heads(2, 1, 128, dtype=dtype), (2500,)),
        *(case for case in all_features(largest) if case.name in ("documents", "passages", "all together")),
    ]


def all_features(heads: Heads) -> list[Case]:
    """What plans and calls may ask for, with these heads."""
    answers = ((3, 2), (4, 2), (7, 6), (9, 6))
    questions = ((4, ((2, 0, 300), (1, 5, 127))), (7, ((1, 0, 70), (6, 100, 513), (2, 128, 192))), (9, ((4, 0, 129),)))
    images = ((2, ((10, 100), (150, 151), (200, 300))), (4, ((0, 129),)), (6, ((0, 70), (70, 300))))
    return [
        Case("documents", heads),
        Case("window", heads, window=100),
        Case("full mask", heads, mask="full"),
        Case("full mask with a window", heads, mask="full", window=70),
        Case("rows that see each other", heads, bidirectional=images),
        Case("the same, with a window", heads, window=90, bidirectional=images),
        Case("shared prompts", heads, branches=tuple((d, ((of, 0, LENGTHS[of]),)) for d, of in answers)),
        Case("passages", heads, branches=questions),
        Case("softcap", heads, softcap=3.0),
        Case("sinks", heads, has_sinks=True),
        Case("gradient of lse", heads, has_dlse=True),
        Case("scale below zero", heads, scale=-0.2),
        Case("one key outweighs all", heads, spread=12.0),
        Case("all together", heads, window=200, softcap=5.0, has_sinks=True, has_dlse=True, bidirectional=images),
    ]


def between_ranks(heads: Heads) -> list[Case]:
    """What plans may ask of ranks that exchange rows."""
    found = {case.name: case for case in all_features(heads)}
    names = ("documents", "window", "rows that see each other", "shared prompts", "all together", "passages")
    retained = Case("retained keys", heads, retain_bytes=1 << 30)
    return [*(found[name] for name in names), retained, Case("sums in their dtype", heads, reduce_dtype=heads.dtype)]
