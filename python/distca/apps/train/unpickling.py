"""Reads what `torch.distributed.checkpoint` has pickled into a checkpoint, and runs nothing that is named in it.

A checkpoint has two kinds of pickles: the index (`.metadata`), and the values in `.distcp` files that are not tensors.
PyTorch would unpickle both without restrictions.
"""

from __future__ import annotations

import copyreg
import functools
import io
import operator
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from distca.apps.train.manifest import CheckpointError, what_to_do

INDEX = ".metadata"

Value = TypeVar("Value")


class _Record:
    """A stand-in for an instance of one of DCP's classes while the index is read. It holds what was pickled.

    A pickle that tries to set an attribute of the class itself finds `__setstate__`, and fails.
    """

    __slots__ = ("state",)

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Metadata(_Record): ...


class _MetadataIndex(_Record): ...


class _TensorStorageMetadata(_Record): ...


class _BytesStorageMetadata(_Record): ...


class _ChunkStorageMetadata(_Record): ...


class _TensorProperties(_Record): ...


class _StorageInfo(_Record): ...


class _Ignored(_Record):
    """A stand-in for objects that nothing needs: they say where the checkpoint was written."""

    def __new__(cls, *parts: object) -> _Ignored:
        return super().__new__(cls)


_METADATA = "torch.distributed.checkpoint.metadata"
_STANDS_FOR: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "MetadataIndex"): _MetadataIndex,
    (_METADATA, "TensorStorageMetadata"): _TensorStorageMetadata,
    (_METADATA, "BytesStorageMetadata"): _BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): _ChunkStorageMetadata,
    (_METADATA, "TensorProperties"): _TensorProperties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): {0: "contiguous"}.__getitem__,
    (_METADATA, "StorageMeta"): _Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): {"torch.strided": "strided"}.__getitem__,
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): _Ignored,
    ("pathlib", "WindowsPath"): _Ignored,
    ("pathlib._local", "PosixPath"): _Ignored,
    ("pathlib._local", "WindowsPath"): _Ignored,
    **{("torch", str(kind)[6:]): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
}
"""What each name in an index becomes. All of it is data or makes data, and a pickle can change none of it."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STANDS_FOR:
            raise CheckpointError(
                f"{self._path} names {module}.{name}, which no index of a checkpoint needs: unpickling it could run "
                f"any code; {what_to_do(self._path.parent)}"
            )
        return _STANDS_FOR[module, name]


def read_index(checkpoint: Path, sizes: Mapping[str, int]) -> Metadata:
    """The index of a checkpoint. `sizes` are the bytes of its files by name. Raises CheckpointError."""
    path = checkpoint / INDEX
    copyreg.clear_extension_cache()  # entries of other unpicklers would be taken without find_class
    try:
        # Reading from memory allocates nothing for a string whose length is wrong.
        return _index(_Unpickler(io.BytesIO(path.read_bytes()), path).load(), sizes)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # pickles that are no index fail in many ways
        raise CheckpointError(
            f"{path} is not an index of a checkpoint ({_reason(error)}); {what_to_do(checkpoint)}"
        ) from error


def _index(record: object, sizes: Mapping[str, int]) -> Metadata:
    fields = _fields(record, _Metadata)
    index = Metadata(
        state_dict_metadata={
            _typed(name, str): _bytes_or_tensor(value)
            for name, value in _typed(fields["state_dict_metadata"], dict).items()
        },
        storage_data={
            _position(position): _storage(storage, sizes)
            for position, storage in _typed(fields["storage_data"], dict).items()
        },
        storage_meta=StorageMeta(),
        version=_typed(fields["version"], str),
    )
    for name, value in index.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in value.chunks] if isinstance(value, TensorStorageMetadata) else [None]
        if any(MetadataIndex(name, offset) not in index.storage_data for offset in offsets):
            raise ValueError(f"a part of {name} is in no file")
    return index


def _bytes_or_tensor(record: object) -> BytesStorageMetadata | TensorStorageMetadata:
    if type(record) is _BytesStorageMetadata:
        return BytesStorageMetadata()
    fields = _fields(record, _TensorStorageMetadata)
    dtype = _typed(_typed(fields["properties"], _TensorProperties).state, tuple)[0]
    chunks = [_fields(chunk, _ChunkStorageMetadata) for chunk in _typed(fields["chunks"], list)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_typed(dtype, torch.dtype)),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(offsets=_size(chunk["offsets"]), sizes=_size(chunk["sizes"])) for chunk in chunks],
    )


def _position(record: object) -> MetadataIndex:
    fields = _fields(record, _MetadataIndex)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        offset=None if offset is None else _size(offset),
        index=None if index is None else _typed(index, int),
    )


def _storage(record: object, sizes: Mapping[str, int]) -> Any:
    """The file of the checkpoint, and the place in it, where a value is. The class has no public name."""
    fields = _fields(record, _StorageInfo)
    name, offset, length = _typed(fields["relative_path"], str), fields["offset"], fields["length"]
    if name not in sizes:
        raise ValueError(f"a value is in {name!r}, which is not a file of the checkpoint")
    if not 0 <= _typed(offset, int) <= _typed(offset, int) + _typed(length, int) <= sizes[name]:
        raise ValueError(f"a value has {length} bytes from {offset} on in {name}, which has {sizes[name]} bytes")
    if fields.get("transform_descriptors"):
        raise ValueError(f"a value in {name} is encoded, but runs do not encode values")
    return dcp.filesystem._StorageInfo(name, offset, length)


def _fields(record: object, kind: type[_Record]) -> dict[str, Any]:
    return _typed(_typed(record, kind).state, dict)


def _size(values: object) -> torch.Size:
    sizes = _typed(values, tuple)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{sizes!r} is not the size of a tensor")
    return torch.Size(sizes)


def _typed(value: object, kind: type[Value]) -> Value:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} must be")
    return value


class Reader(dcp.FileSystemReader):
    """Reads the files of a checkpoint whose index `read_index` has read. A CheckpointError names the file."""

    def __init__(self, checkpoint: Path, index: Metadata) -> None:
        super().__init__(checkpoint)
        self._checkpoint, self._index = checkpoint, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except OSError:
                raise
            except Exception as error:  # files that are no checkpoint's fail in many ways
                raise CheckpointError(
                    f"{self._checkpoint / name} holds what no run writes ({_reason(error)}); "
                    f"{what_to_do(self._checkpoint)}"
                ) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Planner(dcp.DefaultLoadPlanner):
    """Loads other values than tensors with `weights_only` too: numbers, strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *path, last = self.mappings[read_item.dest_index.fqn]
        holder: Any = functools.reduce(operator.getitem, path, cast(Any, self.original_state_dict))
        holder[last] = torch.load(value, weights_only=True)


def _reason(error: Exception) -> str:
    """The error in one line, without torch's advice to switch its check off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    by_torch = [line for line in lines if "WeightsUnpickler error: " in line]
    kept = by_torch or [line for line in lines if "weights_only" not in line]
    return f"{type(error).__name__}: {' '.join(kept).partition('Please ')[0].strip()}"
