"""Sources of documents: folders of text, JSON lines, and tables that the package datasets reads, of text or tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distca.errors import InvalidArgumentError

_EXCLUDED = frozenset({"test", "idlelib", "site-packages", "dist-packages", "__pycache__"})
#: The fraction of each document of Python's own sources that is kept by default. At some 4096 tokens a rank it keeps
#: the shape of the distribution of lengths, and therefore the imbalance.
STANDARD_LIBRARY_SCALE = 1 / 16
_READ_AT_ONCE = 256  # rows of a dataset
TEXT, TOKENS = "text", "input_ids"
"""The columns of a dataset that are used: documents as text, or as tokens, which come first if both are there."""


class DataError(InvalidArgumentError):
    """The data is missing, unreadable or holds no text."""


class Source(ABC):
    """A source of documents in a fixed order.

    Attributes:
        root: the folder or file that was asked for.
        files: the files that all documents come from. Their contents determine the documents.
        unit: what a document is in it: files, lines or rows.
        what: the source in words.
    """

    def __init__(self, root: Path, files: Sequence[Path], unit: str) -> None:
        self.root, self.files, self.unit = root, list(files), unit
        self.what = f"data {'file' if root.is_file() else 'folder'} {root}"

    @abstractmethod
    def documents(self) -> Iterator[bytes | Sequence[int] | None]:
        """Yields text in UTF-8, or tokens; None for what is neither, such as a picture."""

    @abstractmethod
    def none_found(self, found: int, skipped: int) -> str:
        """Why there is nothing to train on."""


def find_source(path: Path | None) -> Source:
    """The documents of a path; without a path the Python standard library's sources.

    A path is a folder of UTF-8 files, a `.jsonl` file of objects with a text or a folder with such files, a `.parquet`
    file or a folder with such files, or a folder that `datasets.Dataset.save_to_disk` has written. Beside `.parquet` or
    `.jsonl` files, which count in this order, other files are left out.

    Raises:
        DataError: the path is none of these.
    """
    root = path if path is not None else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise DataError(f"data folder {root} does not exist")
    if path is None:
        return TextFiles(root, _standard_library_files(root))
    if root.is_file() and root.suffix == ".jsonl":
        return JsonLines(root, [root])
    if root.is_file() and root.suffix == ".parquet":
        return Rows(root, [root])
    if not root.is_dir():
        raise DataError(f"data folder {root} is neither a folder nor a .jsonl or .parquet file")
    if (root / "dataset_dict.json").is_file():
        splits = ", ".join(file.parent.name for file in sorted(root.glob("*/dataset_info.json")))
        raise DataError(f"data folder {root} has the splits {splits}: name the folder of one of them")
    files = _files(root)
    if (root / "dataset_info.json").is_file() and (root / "state.json").is_file():
        return Rows(root, files)
    for suffix, kind in ((".parquet", Rows), (".jsonl", JsonLines)):
        if found := [file for file in files if file.suffix == suffix]:
            return kind(root, found)
    return TextFiles(root, files)


class TextFiles(Source):
    """Files, each of which is a document."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        super().__init__(root, files, "files")

    def documents(self) -> Iterator[bytes | None]:
        for path in self.files:
            try:
                content = path.read_bytes()
                content.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                yield None
            else:
                yield content

    def none_found(self, found: int, skipped: int) -> str:
        return f"{found} files below it, of which {skipped} are not UTF-8"


class JsonLines(Source):
    """Files whose lines are JSON objects with a text."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        super().__init__(root, files, "lines")

    def documents(self) -> Iterator[bytes | None]:
        for path in self.files:
            try:
                with open(path, "rb") as file:
                    for line in file:
                        yield _text_of(line)
            except OSError as error:
                raise DataError(f"data file {path} cannot be read: {error.strerror}") from error

    def none_found(self, found: int, skipped: int) -> str:
        return f"{found} lines, of which {skipped} are not JSON objects with a text"


class Rows(Source):
    """Tables whose rows have a text, or tokens."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        super().__init__(root, files, "rows")

    def documents(self) -> Iterator[bytes | Sequence[int] | None]:
        if importlib.util.find_spec("datasets") is None:
            raise DataError(f"{self.what} is read by the package datasets: pip install datasets")
        import datasets

        try:
            yield from self._values(datasets)
        except DataError:
            raise
        except (OSError, ValueError, TypeError, KeyError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{self.what} cannot be read by the package datasets: {reason}") from error

    def _values(self, datasets: Any) -> Iterator[bytes | Sequence[int] | None]:
        if self.files[0].suffix == ".parquet":
            files = [str(file) for file in self.files]
            # Without a number of rows it reads as many as a file's first group has, which may be none.
            at_once = {"batch_size": _READ_AT_ONCE, "streaming": True}
            rows = datasets.load_dataset("parquet", data_files=files, split="train", **at_once)
        else:
            rows = datasets.load_from_disk(str(self.root))
        columns = list(rows.column_names or [])
        column = next((name for name in (TOKENS, TEXT) if name in columns), None)
        if column is None:
            raise DataError(f"{self.what} has the columns {', '.join(columns)}; {TEXT} or {TOKENS} is needed")
        for batch in rows.select_columns([column]).iter(batch_size=_READ_AT_ONCE):
            for value in batch[column]:
                if column == TEXT:
                    yield value.encode() if isinstance(value, str) else None
                elif value is None or isinstance(value, list):
                    yield value
                else:
                    raise DataError(f"{self.what} has a row whose {TOKENS} is {value!r}; a list of tokens is needed")

    def none_found(self, found: int, skipped: int) -> str:
        return f"{found} rows, of which {skipped} have no {TEXT}"


def _text_of(line: bytes) -> bytes | None:
    """The text of a line of JSON lines; None for a line without a text."""
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
