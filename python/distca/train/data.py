"""Documents, and the packing of a stream of them into the ranks of each step.

Every rank reads the same documents in the same order, so each knows the layout of all ranks without any traffic.
Documents are packed with spill-over: one that is longer than what is left on a rank goes on on the next rank. What
does not fit into a step goes on in the next step as a document of its own. Targets are shifted within the whole
document before any cut, so the last token of a segment has its target wherever the next token lives; only the last
token of a document has none.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sysconfig
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distca.errors import InvalidArgumentError
from distca.halves import Half, halves
from distca.layout import Layout

if TYPE_CHECKING:
    from distca.train.tokens import Tokenizer

NO_TARGET = -100
_EXCLUDED = frozenset({"test", "idlelib", "site-packages", "dist-packages", "__pycache__"})


class DataError(InvalidArgumentError):
    """The data is missing, unreadable or holds no text."""


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, in a fixed order, and what was left out."""

    documents: Sequence[bytes | array[int]]
    num_skipped: int  # files that are not UTF-8 text or could not be read, or lines that are no objects with a text
    unit: str = "files"  # what was skipped: files or lines

    def fingerprint(self) -> int:
        """The same on every rank that has read the same documents."""
        value = 0
        for document in self.documents:
            value = zlib.crc32(len(document).to_bytes(8, "little") + bytes(document), value)
        return value

    def split(self, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
        """The documents to train on, and `fraction` of all, at least one, that the seed chooses to be held out."""
        order = list(range(len(self.documents)))
        random.Random(f"{seed}/held out").shuffle(order)
        num_held_out = min(max(1, round(fraction * len(order))), len(order) - 1)
        parts = [
            replace(self, documents=_Some(self.documents, sorted(part)))
            for part in (order[num_held_out:], order[:num_held_out])
        ]
        for part, what in zip(parts, ("to train on", "held out"), strict=True):
            if max(map(len, part.documents), default=0) < 2:
                raise DataError(
                    f"of {len(order)} documents none of those {what} has two or more tokens, with --eval-fraction "
                    f"{fraction:g}"
                )
        return parts[0], parts[1]


class _Some(Sequence[Any]):
    """Some of the documents, by their numbers."""

    def __init__(self, documents: Sequence[Any], numbers: Sequence[int]) -> None:
        self._documents, self._numbers = documents, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return _Some(self._documents, self._numbers[place])
        return self._documents[self._numbers[place]]


def read_corpus(source: Path | None, kept_fraction: float, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads all files below a folder, or the lines of a `.jsonl` file; of each document the first `kept_fraction`.

    Without a source it is the Python standard library's sources, without a tokenizer the tokens are bytes. What is no
    text is skipped and counted; empty documents are ignored. Raises DataError if there is nothing to train on.
    """
    root = source if source is not None else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"data folder {root} does not exist")
    lines = root.is_file() and root.suffix == ".jsonl"
    if not lines and not root.is_dir():
        raise DataError(f"data folder {root} is not a folder, nor a .jsonl file")
    documents: list[bytes | array[int]] = []
    num_found = num_skipped = 0
    for text in _texts(root, lines, source is None):
        num_found += 1
        if text is None:
            num_skipped += 1
        elif text:
            tokens = text if tokenizer is None else tokenizer.encode(text.decode())
            documents.append(tokens[: max(1, round(len(tokens) * kept_fraction))])
    documents = [document for document in documents if document]
    what = f"data {'file' if lines else 'folder'} {root}"
    if not documents:
        found = (
            f"{num_found} lines, of which {num_skipped} are no JSON objects with a text"
            if lines
            else f"{num_found} files below it, of which {num_skipped} are not UTF-8"
        )
        raise DataError(f"{what} holds no text: {found}")
    if max(len(document) for document in documents) < 2:
        unit = "bytes" if tokenizer is None else "tokens"
        raise DataError(f"{what} has no document of two or more {unit}, so there is nothing to predict")
    return Corpus(documents, num_skipped, "lines" if lines else "files")


def _texts(root: Path, lines: bool, standard_library: bool) -> Iterator[bytes | None]:
    """The documents in UTF-8; None for what is not text."""
    if lines:
        with open(root, "rb") as file:
            for line in file:
                yield _text_of(line)
        return
    for path in _standard_library_files(root) if standard_library else _files(root):
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            yield None
        else:
            yield content


def _text_of(line: bytes) -> bytes | None:
    """The text of a line of JSON lines; None for a line without."""
    try:
        value = json.loads(line)
        return value["text"].encode() if isinstance(value, dict) and isinstance(value.get("text"), str) else None
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or a lone surrogate in the text
        return None


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
    """Tokens [begin, end) of a document, packed into one step."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True)
class Batch:
    """What one rank holds in one step, and the layout of all ranks. Rows of the tensors: [1, T] int64."""

    layout: Layout
    input_ids: torch.Tensor
    labels: torch.Tensor  # the next token of the document, NO_TARGET after its last
    num_targets: int  # of all ranks
    targets_of: tuple[int, ...] = ()  # of each document, on all ranks

    def halves(self, rank: int, window: int | None = None) -> tuple[Batch, Batch]:
        """What ping-pong runs at once. A rank without rows in a half has one of padding, for models that need one."""
        first, second = halves(self.layout, window=window, idle_rows=1)
        return self._half(first, rank), self._half(second, rank)

    def _half(self, half: Half, rank: int) -> Batch:
        return Batch(
            half.layout,
            half.take(self.input_ids, rank, dim=1),
            half.take(self.labels, rank, dim=1, fill=NO_TARGET),
            num_targets=sum(self.targets_of[document] for document in half.documents),
        )


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
        targets_of = tuple(
            piece.end - piece.begin - (piece.end == len(self._corpus.documents[piece.document])) for piece in pieces
        )
        tokens: list[int] = []
        targets: list[int] = []
        for document, begin, end in layout.segments(self._rank):
            piece = pieces[document]
            content = self._corpus.documents[piece.document]
            first, last = piece.begin + begin, piece.begin + end
            tokens += content[first:last]
            targets += content[first + 1 : last + 1]
            if last == len(content):
                targets.append(NO_TARGET)
        return Batch(
            layout,
            input_ids=torch.tensor([tokens], dtype=torch.int64),
            labels=torch.tensor([targets], dtype=torch.int64),
            num_targets=sum(targets_of),
            targets_of=targets_of,
        )
