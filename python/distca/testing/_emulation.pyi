"""Types of the pybind11 module (cpp/emulation/python). Private: use the wrappers in the package."""

from collections.abc import Sequence

from distca._C import Context, CostModel, ShmListener, TcpListener

class Transport:
    def signal(self, peer: int, word: int, value: int) -> None: ...
    def load(self, word: int) -> int: ...
    def publish(self, word: int, value: int) -> None: ...
    def peek(self, peer: int, word: int) -> int: ...
    def peek_words(self, peer: int, first: int, count: int) -> tuple[bool, list[int]]: ...
    def wait(self, word: int, value: int, timeout: float) -> bool: ...
    def quiet(self) -> None: ...
    def departed(self, peer: int | None = None) -> tuple[int, bool] | None: ...

def make_loopback(
    *,
    names: Sequence[str],
    slot_bytes: int,
    timeout: float,
    cost: CostModel,
    device: str = "cpu",
    attention: str = "auto",
    put_blocks: int = 0,
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    link: tuple[float, float, bool] | None = None,
    replay: tuple[CostModel, float, CostModel, float] | None = None,
    streams: bool = False,
    hosts: int = 1,
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
    cost: CostModel,
    progress_thread: bool = False,
    reorder_seed: int | None = None,
    link: tuple[float, float, bool] | None = None,
    cpu_isa: str = "",
) -> Context: ...
def connect_ipc(
    *,
    listener: ShmListener | TcpListener,
    rank: int,
    addresses: Sequence[str],
    name: str,
    slot_bytes: int,
    timeout: float,
    connect_timeout: float,
    cost: CostModel,
) -> Context: ...
def connect_tcp(
    *, listener: TcpListener, rank: int, addresses: Sequence[str], num_signals: int, timeout: float
) -> Transport: ...
def find_context(name: str) -> Context: ...
def take_transfers(context: Context) -> list[tuple[int, int, int, int]]: ...
def fill_with_nan(context: Context) -> None: ...
def mark_died(context: Context) -> None: ...
def send_rows(
    context: Context, peer: int, address: int, num_rows: int, row_bytes: int, word: int, value: int
) -> None: ...
def join(context: Context) -> None: ...
def quiet(context: Context) -> None: ...
def exchange(context: Context) -> None: ...
