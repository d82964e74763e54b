"""Types of the pybind11 module (cpp/python/module.cpp). Private: use the wrappers in the package."""

from collections.abc import Sequence
from typing import Any

class Layout:
    def __init__(self, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> None: ...
    @staticmethod
    def from_documents(lengths: Sequence[Sequence[int]]) -> Layout: ...
    @staticmethod
    def packed(lengths: Sequence[int], ranks: int, tokens_per_rank: int) -> Layout: ...
    @staticmethod
    def head_tail(lengths: Sequence[int], ranks: int) -> Layout: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def document_lengths(self) -> list[int]: ...
    def num_rows(self, rank: int) -> int: ...
    def segments(self, rank: int) -> list[tuple[int, int, int]]: ...

class Plan:
    def __init__(
        self,
        *,
        layout: Layout,
        q_heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int,
        dtype: int,
        per_pair: int,
        per_row: int,
        tolerance_ppm: int,
        min_rows: int,
        balance: bool,
        capacity: int,
        context_epoch: int,
        mask_kind: int,
        window: int,
        servers: Sequence[int],
        tasks: Sequence[tuple[int, int, int, int, int, int]] | None = None,
    ) -> None: ...
    @property
    def digest(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def tasks(self) -> list[tuple[int, int, int, int, int, int, int, int, int]]: ...
    def slice(self, rank: int) -> bytearray: ...

class Context:
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def step(self) -> int: ...
    def set_fill_with_nan(self, on: bool) -> None: ...
    def mark_died(self) -> None: ...

class ShmListener:
    def __init__(self) -> None: ...
    @property
    def address(self) -> str: ...

def make_loopback(
    *,
    names: Sequence[str],
    slot_bytes: int,
    timeout: float,
    per_pair: int,
    per_row: int,
    epoch: int,
    reorder_seed: int | None = None,
) -> list[Context]: ...
def connect_shm(
    *,
    listener: ShmListener,
    rank: int,
    addresses: Sequence[str],
    name: str,
    slot_bytes: int,
    timeout: float,
    connect_timeout: float,
    per_pair: int,
    per_row: int,
    epoch: int,
    reorder_seed: int | None = None,
) -> Context: ...
def remove_context(name: str) -> bool: ...
def find_context(name: str) -> Context: ...
def validate_plan(words: Any) -> None: ...
def cpu_isa() -> str: ...
