"""Documents that begin with rows of others: at random, and their attention in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import distca
from distca.planner.layout import Begins
from support.batches import Batch
from support.oracle import visible


class Tree(NamedTuple):
    """Documents, the rows that each has of its own, and what each branch begins with: all rows of another document
    before its own, or rows of others.
    """

    lengths: list[int]
    own: list[range]
    branches: dict[int, Begins]

    def layout(self, ranks: int, seed: int) -> distca.Layout:
        """Own rows cut at random, on random ranks in random order, with padding between them."""
        rng = random.Random(seed)
        segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        for document, rows in enumerate(self.own):
            cuts = sorted({rows.start, rows.stop, *(rng.choice(rows) for _ in range(rng.randrange(3)))})
            for begin, end in zip(cuts, cuts[1:], strict=False):
                segments[rng.randrange(ranks)].append((document, begin, end))
        for of_rank in segments:
            rng.shuffle(of_rank)
            for _ in range(rng.randrange(2)):
                of_rank.insert(rng.randrange(len(of_rank) + 1), (distca.PADDING, 0, rng.choice((1, 5, 64))))
        return distca.Layout(segments, branches=self.branches)

    def path(self, document: int) -> list[tuple[int, range]]:
        """The rows that the document has, as rows that are some document's own, in order."""
        own = (document, self.own[document])
        begins = self.branches.get(document, [])
        if not isinstance(begins, int):
            return [*((of, range(begin, end)) for of, begin, end in begins), own]
        *above, (parent, rows) = self.path(begins)
        return [*above, (parent, range(rows.start, own[1].start)), own]


def random_tree(seed: int, documents: int = 8, *, merges: bool = True) -> Tree:
    """Documents of which most branch off another one, at any of its own rows or at its end. With `merges` some begin
    with rows of several others, which may begin with rows of theirs.
    """
    rng = random.Random(seed)
    num_rows = [rng.choice([1, 2, 31, 63, 64, 65, 100, 129, 200]) for _ in range(documents)]
    kinds = [rng.random() for _ in range(documents)]
    parents = {d: rng.randrange(d) for d in range(1, documents) if (0.4 if merges else 0) <= kinds[d] < 0.85}
    above = [[d] for d in range(documents)]  # each document and those that it branches off
    for document, parent in parents.items():
        above[document] += above[parent]
    firsts: list[int] = []
    merged: dict[int, list[tuple[int, int, int]]] = {}  # rows are counted from a document's first own one
    for document in range(documents):
        firsts.append(0)
        others = [d for d in range(documents) if document not in above[d]]
        if document in parents:
            parent = parents[document]
            firsts[-1] = firsts[parent] + rng.choice([num_rows[parent], rng.randint(1, num_rows[parent])])
        elif merges and kinds[document] < 0.4 and others:
            ranges = []
            for of in rng.sample(others, rng.randint(1, min(4, len(others)))):
                begin, end = sorted(rng.sample(range(num_rows[of] + 1), 2)) if rng.random() < 0.6 else (0, num_rows[of])
                ranges.append((of, begin, end))
                if end < num_rows[of] and rng.random() < 0.3:
                    ranges.append((of, end, num_rows[of]))
            rng.shuffle(ranges)
            merged[document] = ranges
            firsts[-1] = sum(end - begin for _, begin, end in ranges)
    order = list(range(documents))  # of numbers: a branch may come before what it branches off
    rng.shuffle(order)
    new = {old: number for number, old in enumerate(order)}
    branches: dict[int, Begins] = {new[document]: new[parent] for document, parent in parents.items()}
    for document, ranges in merged.items():
        branches[new[document]] = [(new[of], firsts[of] + begin, firsts[of] + end) for of, begin, end in ranges]
    own = [range(first, first + rows) for first, rows in zip(firsts, num_rows, strict=True)]
    return Tree([own[old].stop for old in order], [own[old] for old in order], branches)


def branched(layout: distca.Layout, seed: int) -> distca.Layout:
    """The layout with most documents made branches of earlier ones: the same rows, which count from further on."""
    draw = random.Random(seed)
    firsts: list[int] = []
    parents: dict[int, int] = {}
    for document in range(len(layout.document_lengths)):
        firsts.append(0)
        if document > 0 and draw.random() < 0.75:
            parents[document] = parent = draw.randrange(document)
            firsts[-1] = firsts[parent] + draw.randint(1, layout.document_lengths[parent])
    segments = [
        [
            (d, begin, end) if d < 0 else (d, begin + firsts[d], end + firsts[d])
            for d, begin, end in layout.segments(rank)
        ]
        for rank in range(layout.num_ranks)
    ]
    return distca.Layout(segments, branches=parents)


def in_two(layout: distca.Layout) -> distca.Layout:
    """The layout with the second half of each document made a branch of the first half: the same attention."""
    parents: dict[int, int] = {}
    begins: list[tuple[int, int, int]] = []  # of each document: its number, that of its second half, where this begins
    for length in layout.document_lengths:
        number = len(begins) + len(parents)
        begins.append((number, number + 1, length // 2) if length > 1 else (number, number, length))
        if length > 1:
            parents[number + 1] = number
    segments: list[list[tuple[int, int, int]]] = []
    for rank in range(layout.num_ranks):
        segments.append([])
        for document, begin, end in layout.segments(rank):
            if document == distca.PADDING:
                segments[-1].append((document, begin, end))
                continue
            first, second, middle = begins[document]
            parts = [(first, begin, min(end, middle)), (second, max(begin, middle), end)]
            segments[-1] += [part for part in parts if part[1] < part[2]]
    return distca.Layout(segments, branches=parents)


def own_rows(batch: Batch, tree: Tree) -> torch.Tensor:
    """The rows of the batch that are some document's own. It has places for shared rows, too."""
    return torch.cat([torch.arange(rows.start, rows.stop) + batch.offsets[d] for d, rows in enumerate(tree.own)])


def attention_of_tree(
    batch: Batch,
    tree: Tree,
    dtype: torch.dtype,
    *,
    mask: str = "causal",
    window: int | None = None,
    bidirectional: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv of all own rows, by the textbook formula and PyTorch's autograd, or with `fused` by
    PyTorch's own attention.

    Each document attends over its rows put together, and autograd adds the gradients of those that several have.
    """
    q, k, v = (t.detach().to(dtype, copy=True).requires_grad_() for t in (batch.q, batch.k, batch.v))
    outs, lses = [], []
    group = batch.heads.q // batch.heads.kv
    for document, rows in enumerate(tree.own):
        at = batch.offsets[document]
        keys, values = (
            torch.cat([t[batch.offsets[d] + r.start : batch.offsets[d] + r.stop] for d, r in tree.path(document)])
            for t in (k, v)
        )
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        queries = q[at + rows.start : at + rows.stop]
        seen = visible(rows.stop, mask, window, (bidirectional or {}).get(document, ()))[rows.start :]
        if fused:
            of_heads = [t.transpose(0, 1)[None] for t in (queries, keys, values)]
            outs.append(F.scaled_dot_product_attention(*of_heads, seen)[0].transpose(0, 1))
            added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
            lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(t.detach() for t in of_heads), attn_mask=added
            )[1]
            lses.append(lse.float().reshape(len(of_heads[0][0]), rows.stop - rows.start).T)
        else:
            scores = torch.einsum("ihd,jhd->hij", queries, keys) * batch.heads.dim**-0.5
            scores = scores.masked_fill(~seen, -math.inf)
            lses.append(torch.logsumexp(scores, dim=2).T)
            outs.append(torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=2), values))
    out, lse, mine = torch.cat(outs), torch.cat(lses), own_rows(batch, tree)
    out.backward(batch.dout[mine].to(dtype))
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), lse.detach(), q.grad[mine], k.grad[mine], v.grad[mine]


def rows_of(tree: Tree, document: int) -> list[tuple[int, int]]:
    """All rows that the document sees, as (document, row) of the document that has them of its own."""
    return [(of, row) for of, rows in tree.path(document) for row in rows]


def rows_on(layout: distca.Layout, rank: int) -> list[tuple[int, int]]:
    """The rank's rows, as (document, row)."""
    return [(document, row) for document, begin, end in layout.segments(rank) for row in range(begin, end)]
