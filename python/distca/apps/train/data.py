"""Batches: a stream of documents, packed into the ranks of each step.

Every rank reads the same documents in the same order. Therefore each knows the layout of all ranks without any traffic.
Documents are packed with spill-over: one that does not fit on a rank continues on the next rank. Head-tail, all ranks
share each long document, and the others are packed. What does not fit into a step is a document of its own in the next
step. With whole documents, what does not fit on a rank is one on the next rank. Targets are shifted within the whole
document before any cut. Therefore the last token of a segment has its target wherever the next token lives; only the
last token of a document has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from distca.apps.common.corpus import Corpus
from distca.apps.common.packing import NO_TARGET, Piece, pack_steps
from distca.planner.halves import Half, halves
from distca.planner.layout import Layout, Window


@dataclass(frozen=True)
class Batch:
    """The rows of one rank in one step, as [1, T] int64 tensors, and the layout of all ranks."""

    layout: Layout
    input_ids: torch.Tensor
    labels: torch.Tensor  # the document's next token; NO_TARGET after the last one
    num_targets: int  # on all ranks
    targets_of: tuple[int, ...] = ()  # of each document, on all ranks

    def halves(self, rank: int, window: Window = None) -> tuple[Batch, Batch]:
        """The two halves for ping-pong. A rank without rows in a half has one row of padding, which models need."""
        first, second = halves(self.layout, window=window, idle_rows=1)
        return self._half(first, rank), self._half(second, rank)

    def _half(self, half: Half, rank: int) -> Batch:
        return Batch(
            half.layout,
            half.take(self.input_ids, rank, dim=1),
            half.take(self.labels, rank, dim=1, fill=NO_TARGET),
            num_targets=sum(self.targets_of[document] for document in half.documents),
        )


class Batches:
    """The batches of one rank from step `start` on; `len()` is their number.

    Which tokens a step holds depends on the seed and on the product `ranks * tokens_per_rank`, not on its factors, nor
    on `homes` (one of `config.HOMES`): where documents lie. They are one after another ("packed"); as by
    `Layout.spread` ("head-tail"); or with `context` too, those of more than half of `tokens_per_rank` on so many
    neighbouring ranks, each of which holds a part from either end. If they are "whole", those that lie on several ranks
    are as many documents.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        rank: int,
        ranks: int,
        tokens_per_rank: int,
        steps: int,
        seed: int,
        start: int = 0,
        homes: str = "packed",
        context: int | None = None,
    ) -> None:
        self._corpus, self._homes, self._context = corpus, homes, context
        self._rank, self._ranks = rank, ranks
        self._tokens_per_rank = tokens_per_rank
        self._start, self._steps, self._seed = start, steps, seed

    def __len__(self) -> int:
        return max(0, self._steps - self._start)

    def __iter__(self) -> Iterator[Batch]:
        parts = self._ranks if self._homes == "whole" else 1  # of a step; documents are cut at their ends
        tokens = self._ranks * self._tokens_per_rank // parts
        packed = pack_steps(self._corpus.lengths(), tokens, self._seed)
        steps = zip(*[packed] * parts, strict=False)
        for step in itertools.islice(steps, self._start, max(self._start, self._steps)):
            yield self._batch(step)

    def _layout(self, lengths: list[list[int]]) -> Layout:
        if self._homes == "whole":
            return Layout.from_documents(lengths)
        [of_step] = lengths
        if self._homes == "packed":
            return Layout.packed(of_step, ranks=self._ranks, tokens_per_rank=self._tokens_per_rank)
        if self._context is None:
            return Layout.spread(of_step, ranks=self._ranks)
        half = self._tokens_per_rank // 2
        return Layout.head_tail(of_step, ranks=self._ranks, longer_than=half, context=self._context)

    def _batch(self, parts: Sequence[list[Piece]]) -> Batch:
        pieces = [piece for part in parts for piece in part]
        layout = self._layout([[piece.end - piece.begin for piece in part] for part in parts])
        targets_of = tuple(
            piece.end - piece.begin - (piece.end == len(self._corpus.document(piece.document))) for piece in pieces
        )
        no_target = torch.tensor([NO_TARGET])
        tokens, targets = [no_target[:0]], [no_target[:0]]
        for document, begin, end in layout.segments(self._rank):
            piece = pieces[document]
            content = self._corpus.document(piece.document)
            first, last = piece.begin + begin, piece.begin + end
            tokens.append(content[first:last].long())
            targets.append(content[first + 1 : last + 1].long())
            if last == len(content):
                targets.append(no_target)
        return Batch(
            layout,
            input_ids=torch.cat(tokens).unsqueeze(0),
            labels=torch.cat(targets).unsqueeze(0),
            num_targets=sum(targets_of),
            targets_of=targets_of,
        )
