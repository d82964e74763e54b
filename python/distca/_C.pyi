"""Types of the pybind11 module (cpp/python). Private: use the wrappers in the package."""

from collections.abc import Callable, Sequence
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

class CostModel:
    def __init__(self, *, per_pair: int, per_row: int, rates: Sequence[int], num_keys_octaves: int) -> None: ...
    def cost(self, mask_kind: int, window: int, length: int, q_begin: int, q_end: int) -> int: ...

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
        cost: CostModel,
        tolerance_ppm: int,
        min_rows: int,
        balance: bool,
        capacity: int,
        context_epoch: int,
        mask_kind: int,
        window: int,
        servers: Sequence[int],
        speeds: Sequence[int],
        ranks_per_node: int,
        forward_only: bool,
        overlap: bool,
        retain_bytes: Sequence[int],
        split_heads: bool,
        tasks: Sequence[tuple[int, int, int, int, int, int]] | None = None,
    ) -> None: ...
    @property
    def digest(self) -> int: ...
    def stats(self) -> dict[str, Any]: ...
    def byte_lower_bounds(self) -> tuple[int, int]: ...
    def tasks(self) -> list[tuple[int, int, int, int, int, int, int, int, int]]: ...
    def transfers(self) -> list[tuple[int, int, int, int, int, int, int, int, int, int]]: ...
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
    @property
    def device(self) -> str: ...
    def attention(self, q_heads: int, kv_heads: int, dim: int, v_dim: int, dtype: int) -> tuple[str, bool]: ...
    def abandon(self, step: int, why: str) -> None: ...
    def set_trace(self, on: bool) -> None: ...
    def take_trace(self) -> list[tuple[str, bool, int, int, int, int, int, int]]: ...
    def take_copies(self) -> list[tuple[int, int, int, int]]: ...
    def take_transfers(self) -> list[tuple[int, int, int, int]]: ...
    def set_fill_with_nan(self, on: bool) -> None: ...
    def check(self) -> None: ...
    def mark_died(self) -> None: ...
    def send_rows(self, peer: int, address: int, num_rows: int, row_bytes: int, word: int, value: int) -> None: ...
    def quiet(self) -> None: ...
    def exchange(self) -> None: ...

class ShmListener:
    def __init__(self) -> None: ...
    @property
    def address(self) -> str: ...

def make_loopback(
    *,
    names: Sequence[str],
    slot_bytes: int,
    timeout: float,
    cost: CostModel,
    epoch: int,
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    link: tuple[float, float, bool] | None = None,
    device: str = "cpu",
    attention: str = "auto",
    replay: tuple[CostModel, float, CostModel, float] | None = None,
    streams: bool = False,
    put_blocks: int = 0,
) -> list[Context]: ...
def connect_ipc(
    *,
    listener: ShmListener,
    rank: int,
    addresses: Sequence[str],
    device: str,
    attention: str,
    put_blocks: int,
    name: str,
    slot_bytes: int,
    timeout: float,
    connect_timeout: float,
    cost: CostModel,
    epoch: int,
) -> Context: ...
def connect_shm(
    *,
    listener: ShmListener,
    rank: int,
    addresses: Sequence[str],
    name: str,
    slot_bytes: int,
    timeout: float,
    connect_timeout: float,
    cost: CostModel,
    epoch: int,
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    link: tuple[float, float, bool] | None = None,
) -> Context: ...
def share_memory(addresses: Sequence[str]) -> bool: ...
def make_torch(
    *,
    rank: int,
    num_ranks: int,
    all_to_all: Callable[[memoryview, list[int], memoryview, list[int]], None],
    abandon: Callable[[str, str], None],
    name: str,
    slot_bytes: int,
    timeout: float,
    cost: CostModel,
    epoch: int,
) -> Context: ...
def remove_context(name: str) -> bool: ...
def find_context(name: str) -> Context: ...
def validate_plan(words: Any) -> None: ...
def cuda_status() -> tuple[bool, int, str]: ...
def nvshmem_status() -> tuple[str, str]: ...
def nvshmem_unique_id() -> bytes: ...
def connect_nvshmem(
    *,
    rank: int,
    num_ranks: int,
    unique_id: bytes,
    device: int,
    attention: str,
    name: str,
    slot_bytes: int,
    timeout: float,
    cost: CostModel,
    epoch: int,
    listener: ShmListener | None,
    addresses: Sequence[str],
    put_blocks: int,
) -> Context: ...
def cpu_isa() -> str: ...
def measure_peak_flops(dtype: int, num_threads: int, seconds: float) -> float: ...
