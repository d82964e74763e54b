"""Documents as tokens, which are made once, kept in a cache, and mapped into the memory of every rank that reads them.

The cache is a folder of the user's own. A corpus lies there under a key made of the contents of its files, the
tokenizer and the fraction of each document that is kept. It is `tokens.bin` and `ends.bin`, which are mapped as they
are, and `corpus.json` with their sizes. The first process that needs it makes it, under a lock on which the others
wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distca.apps.common.files import sync, sync_folder, why
from distca.apps.common.sources import DataError, Source, find_source
from distca.errors import DistcaError

if TYPE_CHECKING:
    from distca.apps.common.tokens import Tokenizer

VARIABLE = "DISTCA_CACHE"
BYTES = 256
"""Size of the vocabulary without a tokenizer: each byte is a token."""
_FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DTYPES = {"B": torch.uint8, "i": torch.int32}
_TEXT_AT_ONCE = 1 << 22  # bytes that are tokenized together


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, in a fixed order, and what was left out.

    tokens: tokens of all documents, one after another; uint8 or int32.
    ends: for each document, where it ends among the tokens; int64.
    num_skipped: number of files that are not UTF-8 text or could not be read, or of lines or rows without a text.
    unit: what was skipped: files, lines or rows.
    fingerprint: equal for equal documents.
    largest: the largest token.
    chosen: numbers of the documents that this corpus has, if it has only some of those in `ends`; int64.
    """

    tokens: torch.Tensor
    ends: torch.Tensor
    num_skipped: int
    unit: str
    fingerprint: int
    largest: int
    chosen: torch.Tensor | None = None

    @staticmethod
    def of(documents: Sequence[bytes | Sequence[int]]) -> Corpus:
        """Makes a corpus in memory, of tokens or of bytes that are tokens."""
        lengths = [len(document) for document in documents]
        fingerprint = 0
        for document in documents:
            fingerprint = _fingerprint(document if isinstance(document, bytes) else array("i", document), fingerprint)
        tokens = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
        ends = torch.tensor(list(itertools.accumulate(lengths)), dtype=torch.int64)
        return Corpus(tokens, ends, 0, "files", fingerprint, int(tokens.max()) if len(tokens) else 0)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.ends if self.chosen is None else self.chosen)

    def vocabulary(self, tokenizer: Tokenizer | None) -> int:
        """How many tokens a model must know: all of the tokenizer (without one, all bytes), and all that occur."""
        known = BYTES if tokenizer is None else tokenizer.vocabulary
        return max(known, self.largest + 1)

    def lengths(self) -> list[int]:
        """Length of each document, in tokens."""
        lengths = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        return (lengths if self.chosen is None else lengths[self.chosen]).tolist()

    def document(self, number: int) -> torch.Tensor:
        """The tokens of a document, as a view."""
        if self.chosen is not None:
            number = int(self.chosen[number])
        begin = int(self.ends[number - 1]) if number else 0
        return self.tokens[begin : int(self.ends[number])]

    def split(self, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
        """Splits the documents into those to train on and those held out.

        `fraction` of all documents, at least one, is held out. `seed` chooses them.

        Raises:
            DataError: one of the two has no document of two or more tokens.
        """
        order = list(range(len(self)))
        random.Random(f"{seed}/held out").shuffle(order)
        num_held_out = min(max(1, round(fraction * len(order))), len(order) - 1)
        parts = [self._some(order[num_held_out:]), self._some(order[:num_held_out])]
        for part, what in zip(parts, ("to train on", "held out"), strict=True):
            if max(part.lengths(), default=0) < 2:
                raise DataError(
                    f"of {len(order)} documents none of those {what} has two or more tokens, with --eval-fraction "
                    f"{fraction:g}"
                )
        return parts[0], parts[1]

    def _some(self, numbers: Sequence[int]) -> Corpus:
        chosen = torch.tensor(sorted(numbers), dtype=torch.int64)
        return replace(self, chosen=chosen, fingerprint=zlib.crc32(bytes(array("q", chosen)), self.fingerprint))


def default_cache() -> Path:
    """The folder of the cache: the environment's ``DISTCA_CACHE``, or `distca` in the user's folder for caches."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distca"


def read_corpus(
    path: Path | None, kept_fraction: float, tokenizer: Tokenizer | None = None, *, show_progress: bool = False
) -> Corpus:
    """The documents of a path (`find_source`) from the cache, which is filled first if need be.

    Of each document the first `kept_fraction` of its tokens is kept. Without a tokenizer the tokens of a text are its
    bytes. What is not text is skipped and counted. Empty documents are ignored. All ranks may call it: the first one of
    a host makes what is not in the cache yet.

    Raises:
        DataError: there is nothing to train on.
        DistcaError: the cache cannot be written.
    """
    source, cache = find_source(path), default_cache()
    with _telling(cache):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        tokens_of = "bytes" if tokenizer is None else tokenizer.digest
        key = hashlib.sha256(f"{_FORMAT} {_content(source, cache)} {tokens_of} {kept_fraction!r}".encode()).hexdigest()
        folder = cache / key
        with open(cache / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                partial = cache / f"{key}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
                partial.mkdir(mode=0o700)
                try:
                    _make(partial, source, kept_fraction, tokenizer, show_progress)
                    sync_folder(partial)  # a loss of power after the rename leaves it whole
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return _open(folder)


@contextlib.contextmanager
def _telling(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DistcaError(
            f"the cache of tokens {cache} cannot be used: {why(error, cache)}; name another folder by {VARIABLE}"
        ) from error


def _content(source: Source, cache: Path) -> str:
    """A digest of the files' contents. Files whose names, sizes and times are unchanged are not read again."""
    seen = hashlib.sha256(source.unit.encode())
    for file in source.files:
        with contextlib.suppress(OSError):  # a file that cannot be read is skipped and counted
            found = file.stat()
            state = f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            seen.update(b"%s\0%s\0" % (os.fsencode(file), state.encode()))  # its name may be in any encoding
    known = cache / f"{seen.hexdigest()}.content"
    with contextlib.suppress(OSError, ValueError):
        if _DIGEST.fullmatch(digest := known.read_text()):
            return digest
    content = hashlib.sha256(source.unit.encode())
    for file in source.files:
        of_file = hashlib.sha256()
        try:
            with open(file, "rb") as opened:
                while part := opened.read(1 << 20):
                    of_file.update(part)
        except OSError as error:
            of_file.update(f"errno {error.errno}".encode())
        content.update(of_file.digest())
    new = known.with_suffix(f".{os.getpid()}")
    new.write_text(content.hexdigest())
    sync(new)
    new.replace(known)
    return content.hexdigest()


def _make(folder: Path, source: Source, kept_fraction: float, tokenizer: Tokenizer | None, show: bool) -> None:
    """Writes a corpus into an empty folder."""
    found = skipped = fingerprint = largest = 0
    ends, end = array("q"), 0
    kind = "B" if tokenizer is None else "i"
    with open(folder / "tokens.bin", "wb") as file:
        for document in _tokens(source, tokenizer, show):
            found += 1
            if document is None:
                skipped += 1
            elif len(document):
                if not ends and not isinstance(document, bytes):
                    kind = "i"
                kept = document[: max(1, round(len(document) * kept_fraction))]
                fingerprint = _fingerprint(kept, fingerprint)
                largest = 0 if isinstance(kept, bytes) else max(largest, max(kept))
                file.write(kept)
                end += len(kept)
                ends.append(end)
    if not ends:
        raise DataError(f"{source.what} holds no text: {source.none_found(found, skipped)}")
    if max(b - a for a, b in zip((0, *ends), ends, strict=False)) < 2:
        unit = "bytes" if kind == "B" else "tokens"
        raise DataError(f"{source.what} has no document of two or more {unit}, so there is nothing to predict")
    (folder / "ends.bin").write_bytes(ends)
    about = {
        "kind": kind,
        "tokens": end,
        "documents": len(ends),
        "num_skipped": skipped,
        "unit": source.unit,
        "fingerprint": fingerprint,
        "largest": largest,
        "source": str(source.root),
    }
    (folder / "corpus.json").write_text(json.dumps(about) + "\n")


def _tokens(source: Source, tokenizer: Tokenizer | None, show: bool) -> Iterator[bytes | array[int] | None]:
    """The documents as tokens. Many at a time go to the tokenizer, which has threads of its own."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in source.files if file.exists())
    bar = tqdm(
        desc="tokenizing", total=total, unit="B", unit_scale=True, ncols=80, disable=not show or not _slow(total)
    )
    with bar:
        for waiting in _in_parts(source.documents()):
            texts = [one.decode() for one in waiting if isinstance(one, bytes)] if tokenizer is not None else []
            encoded = iter(tokenizer.encode_all(texts) if tokenizer is not None else ())
            for one in waiting:
                if one is None or (isinstance(one, bytes) and tokenizer is None):
                    yield one
                elif isinstance(one, bytes):
                    yield next(encoded)
                else:
                    yield _checked(one, source)
            bar.update(sum(_size(one) for one in waiting))


def _slow(total: int) -> bool:
    return total > _TEXT_AT_ONCE and sys.stderr.isatty()


def _size(document: bytes | Sequence[int] | None) -> int:
    return 0 if document is None else len(document) if isinstance(document, bytes) else 4 * len(document)


def _in_parts(documents: Iterator[bytes | Sequence[int] | None]) -> Iterator[list[bytes | Sequence[int] | None]]:
    part: list[bytes | Sequence[int] | None] = []
    size = 0
    for document in documents:
        part.append(document)
        size += _size(document)
        if size >= _TEXT_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _checked(tokens: Any, source: Source) -> array[int]:
    """Tokens that the data brought with it, after a check that they are non-negative 32-bit integers."""
    try:
        checked = array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise DataError(f"{source.what} has a row whose tokens are not 32-bit integers: {error}") from error
    if checked and min(checked) < 0:
        raise DataError(f"{source.what} has a row with a negative token, {min(checked)}")
    return checked


def _fingerprint(document: bytes | array[int], before: int) -> int:
    return zlib.crc32(len(document).to_bytes(8, "little") + bytes(document), before)


def _open(folder: Path) -> Corpus:
    """Maps a corpus into memory. Raises DataError if its files are not as they were written."""
    try:
        about = json.loads((folder / "corpus.json").read_text())
        dtype, num_tokens, num_documents = _DTYPES[about["kind"]], int(about["tokens"]), int(about["documents"])
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "ends.bin")]
        if sizes != [num_tokens * dtype.itemsize, num_documents * 8]:
            raise ValueError(f"its files have {sizes} bytes")
        ends = torch.from_file(str(folder / "ends.bin"), shared=False, size=num_documents, dtype=torch.int64)
        if int(ends[-1]) != num_tokens or bool((torch.diff(ends) <= 0).any()) or int(ends[0]) <= 0:
            raise ValueError("documents do not follow one another")
        tokens = torch.from_file(str(folder / "tokens.bin"), shared=False, size=num_tokens, dtype=dtype)
        numbers = int(about["num_skipped"]), str(about["unit"]), int(about["fingerprint"]), int(about["largest"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"the cached tokens in {folder} are damaged ({error}): remove that folder") from error
    return Corpus(tokens, ends, *numbers)
