"""Documents, and the packing of a stream of them into the ranks of each step.

Every rank reads the same documents in the same order, so each knows the layout of all ranks without any traffic.
Documents are packed with spill-over: one that is longer than what is left on a rank goes on on the next rank. What
does not fit into a step goes on in the next step as a document of its own. Targets are shifted within the whole
document before any cut, so the last token of a segment has its target wherever the next token lives; only the last
token of a document has none.
"""

from __future__ import annotations

import itertools
import os
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from distca.errors import InvalidArgumentError
from distca.planning import Layout

NO_TARGET = -100
_EXCLUDED = frozenset({"test", "idlelib", "site-packages", "dist-packages", "__pycache__"})


class DataError(InvalidArgumentError):
    """The data folder is missing, unreadable or holds no text."""


@dataclass(frozen=True)
class Corpus:
    """Documents as bytes, in a fixed order, and what was left out."""

    documents: list[bytes]
    num_skipped: int  # files that are not UTF-8 text or could not be read

    def fingerprint(self) -> int:
        """The same on every rank that has read the same documents."""
        value = 0
        for document in self.documents:
            value = zlib.crc32(len(document).to_bytes(8, "little") + document, value)
        return value


def read_corpus(folder: Path | None, kept_fraction: float) -> Corpus:
    """Reads all files below `folder` (default: the Python standard library's sources), of each the first
    `kept_fraction`.

    Files that are not UTF-8 are skipped and counted; empty ones are ignored. Raises DataError if there is nothing to
    train on.
    """
    root = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"data folder {root} does not exist")
    if not root.is_dir():
        raise DataError(f"data folder {root} is not a folder")
    documents: list[bytes] = []
    num_files = num_skipped = 0
    for path in _files(root) if folder is not None else _standard_library_files(root):
        num_files += 1
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            num_skipped += 1
            continue
        if content:
            documents.append(content[: max(1, round(len(content) * kept_fraction))])
    if not documents:
        raise DataError(
            f"data folder {root} holds no text: {num_files} files below it, of which {num_skipped} are not UTF-8"
        )
    if max(len(document) for document in documents) < 2:
        raise DataError(f"data folder {root} has no document of two or more bytes, so there is nothing to predict")
    return Corpus(documents, num_skipped)


def _files(root: Path) -> list[Path]:
    return sorted(
        path for folder, _, names in os.walk(root) for name in names if (path := Path(folder, name)).is_file()
    )


def _standard_library_files(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a document, packed into one step."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True)
class Batch:
    """What one rank holds in one step, and the layout of all ranks. Rows of the tensors: [1, T] int64."""

    layout: Layout
    input_ids: torch.Tensor
    labels: torch.Tensor  # the next byte of the document, NO_TARGET after its last
    num_targets: int  # of all ranks


def pack_steps(lengths: list[int], tokens: int, seed: int) -> Iterator[list[Piece]]:
    """Endless steps of exactly `tokens` tokens each: the documents in a new order each epoch, cut where a step is
    full.
    """
    step: list[Piece] = []
    room = tokens
    epoch = 0
    while True:
        order = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for document in order:
            begin = 0
            while begin < lengths[document]:
                end = min(lengths[document], begin + room)
                step.append(Piece(document, begin, end))
                room -= end - begin
                begin = end
                if room == 0:
                    yield step
                    step, room = [], tokens
        epoch += 1


class Batches:
    """The batches of one rank from step `start` on; `len()` is their number.

    What a step holds depends on the seed and on `ranks * tokens_per_rank`, not on either of the two alone.
    """

    def __init__(
        self, corpus: Corpus, *, rank: int, ranks: int, tokens_per_rank: int, steps: int, seed: int, start: int = 0
    ) -> None:
        self._corpus = corpus
        self._rank, self._ranks = rank, ranks
        self._tokens_per_rank = tokens_per_rank
        self._start, self._steps, self._seed = start, steps, seed

    def __len__(self) -> int:
        return max(0, self._steps - self._start)

    def __iter__(self) -> Iterator[Batch]:
        lengths = [len(document) for document in self._corpus.documents]
        packed = pack_steps(lengths, self._ranks * self._tokens_per_rank, self._seed)
        for pieces in itertools.islice(packed, self._start, max(self._start, self._steps)):
            yield self._batch(pieces)

    def _batch(self, pieces: list[Piece]) -> Batch:
        layout = Layout.packed(
            [piece.end - piece.begin for piece in pieces], ranks=self._ranks, tokens_per_rank=self._tokens_per_rank
        )
        tokens, targets = bytearray(), []
        for document, begin, end in layout.segments(self._rank):
            piece = pieces[document]
            content = self._corpus.documents[piece.document]
            first, last = piece.begin + begin, piece.begin + end
            tokens += content[first:last]
            targets += list(content[first + 1 : last + 1])
            if last == len(content):
                targets.append(NO_TARGET)
        return Batch(
            layout,
            input_ids=torch.tensor([list(tokens)], dtype=torch.int64),
            labels=torch.tensor([targets], dtype=torch.int64),
            num_targets=sum(
                piece.end - piece.begin - (piece.end == len(self._corpus.documents[piece.document])) for piece in pieces
            ),
        )
