"""Micro-batches of packed documents, for every data rank, from texts or from a Megatron data set."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from distca.apps.common.corpus import BYTES, Corpus, read_corpus
from distca.apps.common.packing import NO_TARGET, pack_steps
from distca.apps.common.sources import DataError
from distca.apps.common.tokens import Tokenizer
from distca.apps.common.workloads import read_lengths
from distca.apps.pretrain.options import Options
from distca.errors import InvalidArgumentError

#: The fraction of each document of Python's own sources that is kept by default.
_KEPT_OF_LIBRARY = 1 / 16
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
        kept = options.doc_scale or (_KEPT_OF_LIBRARY if options.data is None else 1.0)
        tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
        corpus = read_corpus(options.data, kept, tokenizer)
        vocabulary = corpus.vocabulary(tokenizer)
    if not options.eval_fraction:
        return corpus, None, vocabulary
    return *corpus.split(options.eval_fraction, options.seed), vocabulary


def _random(lengths: list[int], scale: float, seed: int) -> Corpus:
    """Documents of random tokens with these lengths, in the list's order, as many as fit."""
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

    A step is `ranks` times `micro_batches` slots of `tokens` each. What the slots of a step hold depends on the product
    of these numbers alone. Documents are packed one after the other, and are cut where a slot is full and after
    `longest` tokens. Each piece is a document of its own to attention. Its last token is still asked for the token
    after the cut.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` and ``loss_mask``, all ``[1, tokens]``; and ``cu_seqlens``, int32.
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
    ) -> None:
        self._corpus, self._vocabulary = corpus, vocabulary
        self._pieces = [
            (number, begin, min(begin + longest, length))
            for number, length in enumerate(corpus.lengths())
            for begin in range(0, length, longest)
        ]
        slots = pack_steps([end - begin for _, begin, end in self._pieces], tokens, seed)
        self._slots = itertools.islice(slots, start * micro_batches * ranks + rank, None, ranks)

    def __next__(self) -> dict[str, torch.Tensor]:
        tokens, labels, sizes = [], [], [0]
        for piece in next(self._slots):
            document, first, _ = self._pieces[piece.document]
            content = self._corpus.document(document)
            begin, end = first + piece.begin, first + piece.end
            tokens.append(content[begin:end].long())
            labels.append(content[begin + 1 : end + 1].long())
            if end == len(content):
                labels.append(torch.tensor([NO_TARGET]))
            sizes.append(end - begin)
        inputs, targets = torch.cat(tokens)[None], torch.cat(labels)[None]
        if (largest := int(inputs.max())) >= self._vocabulary:
            raise DataError(f"the data have token {largest}, and the model knows {self._vocabulary}")
        return {
            "tokens": inputs,
            "labels": targets.clamp(min=0),
            "loss_mask": (targets != NO_TARGET).float(),
            "position_ids": torch.cat([torch.arange(size) for size in sizes[1:]])[None],
            "cu_seqlens": torch.tensor(sizes).cumsum(0).int(),
        }
