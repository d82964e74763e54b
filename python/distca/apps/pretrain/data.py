"""Micro-batches of packed documents, for every data rank, from texts or from a Megatron data set."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from distca.apps.common.corpus import BYTES, Corpus, read_corpus
from distca.apps.common.packing import NO_TARGET, pack_steps
from distca.apps.common.sources import STANDARD_LIBRARY_SCALE, DataError
from distca.apps.common.tokens import Tokenizer
from distca.apps.common.workloads import read_lengths
from distca.apps.pretrain.options import Options
from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Layout

#: The most random tokens that are made.
_MOST_RANDOM = 1 << 26


def read_documents(options: Options) -> tuple[Corpus, Corpus | None, int]:
    """The documents to train on, those held out or None, and the size of the vocabulary that they need.

    Raises:
        InvalidArgumentError, DataError: there is nothing to train on.
    """
    if options.lengths is not None:
        corpus, vocabulary = _random(read_lengths(options.lengths), options.doc_scale or 1.0, options.seed), BYTES
    elif options.data is not None and Path(f"{options.data}.idx").exists():
        if options.tokenizer is not None or options.doc_scale is not None:
            raise InvalidArgumentError(
                f"--data (DATA) is {options.data}, a Megatron data set, which has tokens: leave out --tokenizer and "
                "--doc-scale"
            )
        corpus, vocabulary = _read_indexed(options.data), 0
    else:
        kept = options.doc_scale or (STANDARD_LIBRARY_SCALE if options.data is None else 1.0)
        tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
        corpus = read_corpus(options.data, kept, tokenizer)
        vocabulary = corpus.vocabulary(tokenizer)
    if not options.eval_fraction:
        return corpus, None, vocabulary
    return *corpus.split(options.eval_fraction, options.seed), vocabulary


def _random(lengths: list[int], scale: float, seed: int) -> Corpus:
    """Documents of random tokens with these lengths, in the list's order, as many as fit."""
    if not lengths:
        raise InvalidArgumentError("--lengths (LENGTHS) names an empty list; the length of a document is expected")
    ends = torch.tensor([max(1, round(length * scale)) for length in lengths]).cumsum(0)
    ends = ends[: max(1, int((ends <= _MOST_RANDOM).sum()))]
    tokens = torch.randint(BYTES, (int(ends[-1]),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Corpus(tokens, ends, 0, "documents", zlib.crc32(ends.numpy().tobytes()), largest=BYTES - 1)


def _read_indexed(prefix: Path) -> Corpus:
    """A data set of Megatron's tools (prefix.bin and prefix.idx), mapped into memory."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        index = IndexedDataset(str(prefix)).index
        sizes = np.asarray(index.sequence_lengths, dtype=np.int64)
        sequences = np.concatenate([[0], np.cumsum(sizes)])
        ends = sequences[np.asarray(index.document_indices[1:], dtype=np.int64)]
        width = np.dtype(index.dtype).itemsize
        if os.path.getsize(f"{prefix}.bin") != sequences[-1] * width or np.any(
            np.asarray(index.sequence_pointers) != sequences[:-1] * width
        ):
            raise ValueError("its two files do not belong together")
        tokens = torch.from_numpy(np.memmap(f"{prefix}.bin", dtype=index.dtype, mode="c"))
    except (OSError, ValueError, IndexError, AssertionError, RuntimeError, EOFError, struct.error) as error:
        raise DataError(f"--data (DATA) is {prefix}, whose .bin and .idx cannot be read: {error}") from error
    kept = torch.from_numpy(ends[np.diff(ends, prepend=0) > 0])
    if not len(kept):
        raise DataError(f"--data (DATA) is {prefix}, a data set without a token")
    fingerprint = zlib.crc32(kept.numpy().tobytes())
    return Corpus(tokens, kept, 0, "documents", fingerprint, largest=0)


class MicroBatches(Iterator[dict[str, torch.Tensor]]):
    """The micro-batches of a data rank from a step on, endlessly.

    A step is `ranks // context` times `micro_batches` slots of `context` times `tokens` each, each of them on `context`
    ranks. What the slots of a step hold depends on these products alone. Documents are packed one after the other, and
    are cut where a slot is full and after `longest` tokens. Each piece is a document of its own to attention. Its last
    token is still asked for the token after the cut.

    Each rank of a slot has `tokens` rows, and documents go on on the next rank. With `cut` the slot has that layout
    instead, of the lengths of its documents on so many ranks, such as `Layout.spread`. If ranks then differ by a few
    rows, they are padded to a multiple of `multiple`.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` and ``loss_mask``, all ``[1, rows]``; ``cu_seqlens``, int32, of the
        parts of documents on this rank; ``lengths`` of the slot's documents; ``segments``, int64 ``[segments, 3]``, of
        this rank, as `distca.PlanAhead` takes them, with numbers of documents that no other slot has.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        rank: int,
        ranks: int,
        micro_batches: int,
        tokens: int,
        longest: int,
        vocabulary: int,
        seed: int,
        start: int = 0,
        context: int = 1,
        cut: Callable[[list[int], int], Layout] | None = None,
        multiple: int = 1,
    ) -> None:
        self._corpus, self._vocabulary, self._tokens, self._multiple = corpus, vocabulary, tokens, multiple
        self._slot, self._place, self._context = rank // context, rank % context, context
        self._cut = cut
        self._pieces = [
            (number, begin, min(begin + longest, length))
            for number, length in enumerate(corpus.lengths())
            for begin in range(0, length, longest)
        ]
        slots = pack_steps([end - begin for _, begin, end in self._pieces], context * tokens, seed)
        count = ranks // context
        self._slots = itertools.islice(slots, start * micro_batches * count + rank // context, None, count)

    def __next__(self) -> dict[str, torch.Tensor]:
        pieces = next(self._slots)
        lengths = [piece.end - piece.begin for piece in pieces]
        if self._cut is not None:
            layout = self._cut(lengths, self._context)
        else:
            layout = Layout.packed(lengths, ranks=self._context, tokens_per_rank=self._tokens)
        segments = layout.segments(self._place)
        told = [(self._slot << 32 | number, begin, end) for number, begin, end in segments]
        tokens, labels, sizes = [], [], [0]
        for number, begin, end in segments:
            document, first, _ = self._pieces[pieces[number].document]
            content, first = self._corpus.document(document), first + pieces[number].begin
            tokens.append(content[first + begin : first + end].long())
            labels.append(content[first + begin + 1 : first + end + 1].long())
            if first + end == len(content):
                labels.append(torch.tensor([NO_TARGET]))
            sizes.append(end - begin)
        positions = layout.position_ids(self._place)
        # Head-tail, a rank may have nothing of documents that are shorter than the number of chunks.
        if padding := -len(positions) % self._multiple or self._multiple * (not segments):
            tokens.append(torch.zeros(padding, dtype=torch.int64))
            labels.append(torch.full((padding,), NO_TARGET))
            positions = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])
            sizes.append(padding)
            told.append((PADDING, 0, padding))
        inputs, targets = torch.cat(tokens)[None], torch.cat(labels)[None]
        if (largest := int(inputs.max())) >= self._vocabulary:
            raise DataError(f"the data have token {largest}, and the model knows {self._vocabulary}")
        return {
            "tokens": inputs,
            "labels": targets.clamp(min=0),
            "loss_mask": (targets != NO_TARGET).float(),
            "position_ids": positions[None],
            "cu_seqlens": torch.tensor(sizes).cumsum(0).int(),
            "lengths": torch.tensor(lengths),
            "segments": torch.tensor(told),
        }
