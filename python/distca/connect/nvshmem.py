"""``transport="nvshmem"``: rows between GPUs of any hosts. Run between processes on one GPU alone so far.

Ranks find each other by NVSHMEM's unique id, which travels over the process group. Therefore it makes no difference
whether torchrun, Slurm or MPI started them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distca import _C
from distca.connect import hosts
from distca.connect.exchange import gather_text
from distca.errors import DeviceError, InvalidArgumentError

_Result = TypeVar("_Result")

_LIBRARY = "libnvshmem_host.so.3"
_process = SimpleNamespace(has_heap=False)  # whether NVSHMEM has allocated a heap in this process
_TOLD = 200
"""The most bytes of a problem that are told to the other ranks."""
HEAP_VARIABLE = "EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB"
"""The environment variable for the heap's size in GiB without ``heap_bytes``. The released DistCA reads it too."""


def library_folder() -> Path | None:
    """The folder of the libraries of the wheel nvidia-nvshmem-cu13 in this Python; None if it is not installed."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        found = None
    folders = [Path(folder) / "lib" for folder in found.submodule_search_locations or []] if found else []
    return next((folder for folder in folders if (folder / _LIBRARY).exists()), None)


@functools.cache
def status() -> tuple[str, str]:
    """NVSHMEM's version, and why the transport is not available; one is empty. It loads the libraries."""
    # In a wheel our library lies beside the one that it needs. Elsewhere it finds that one only if that is loaded
    # already.
    folder = library_folder()
    if folder is not None:
        ctypes.CDLL(str(folder / _LIBRARY))
    return _C.nvshmem_status()


def heap_bytes_of_environment() -> int | None:
    """The bytes that ``EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB`` asks for; None if it is not set."""
    text = os.environ.get(HEAP_VARIABLE)
    if text is None:
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1 << 20:
        raise InvalidArgumentError(f"init: {HEAP_VARIABLE} = {text!r}; a positive number of GiB is expected")
    return int(size * (1 << 30))


def connect(
    group: dist.ProcessGroup | None,
    device: str,
    attention: str,
    name: str,
    options: dict[str, Any],
    put_ctas: int | None = None,
) -> _C.Context:
    """Makes this process a rank. It is collective over the group. ``device`` is ``"cuda:"`` and a number.

    Raises:
        InvalidArgumentError: on all ranks, if the transport is not available on one of them, or if hosts have no
            address at which they reach each other.
        DeviceError: on all ranks, if NVSHMEM does not begin on one of them, or if one cannot use its device or does
            not find the others.
    """
    timeout: float = options["timeout"]
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    member: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "device": int(device.removeprefix("cuda:"))}
    unique_id, problem = b"", status()[1]
    try:
        problem = problem or _check_variables() or _C.nvshmem_problem(**member)
        if rank == 0 and not problem:
            unique_id = _C.nvshmem_unique_id()
    except DeviceError as error:
        problem = str(error)
    # Every rank is told, so that none waits for a rank that cannot come.
    told = [text.split("|", 1) for text in _gather(f"{unique_id.hex()}|{_told(problem)}", group, timeout)]
    for peer, (_, problem) in enumerate(told):
        if problem:
            raise InvalidArgumentError(f"init: transport 'nvshmem' is not available on rank {peer}: {problem}")
    on_all(group, timeout, "nvshmem", lambda: _C.nvshmem_join(**member, unique_id=bytes.fromhex(told[0][0])))
    listener, addresses = hosts.listen(group, timeout)
    connect_timeout = min(timeout, 120.0)

    def prepare() -> _C.NvshmemRank:
        if not _process.has_heap:
            _check_memory(device, 2 * options["slot_bytes"])
        return _C.prepare_nvshmem(
            **member,
            attention=attention,
            name=name,
            listener=listener,
            addresses=addresses,
            put_blocks=put_ctas or 0,
            connect_timeout=connect_timeout,
            **options,
        )

    context = on_all(group, timeout + connect_timeout, "nvshmem", prepare).connect()
    _process.has_heap = True
    return context


def _check_variables() -> str:
    """What NVSHMEM's variables ask for and rows do not survive; empty if nothing."""
    if os.environ.get("NVSHMEM_IBGDA_ENABLE_MULTI_PORT", "0").lower() in ("", "0", "n", "no", "f", "false"):
        return ""
    return (
        "NVSHMEM_IBGDA_ENABLE_MULTI_PORT is set, and with several ports NVSHMEM 3.4 does not order rows before the "
        "signal that they are there: unset it"
    )


def _check_memory(device: str, heap_bytes: int) -> None:
    """Raises DeviceError where the heap is larger than the free memory of the device.

    NVSHMEM allocates it on all ranks together: a rank that cannot would leave the others waiting without limit. It
    keeps the memory of earlier heaps, which later ones may get; therefore only the first one of a process is looked at.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if heap_bytes > free:
        raise DeviceError(
            f"the heap has {heap_bytes} bytes, and {device} has {free} free; lower max_tokens or heap_bytes of "
            "distca.init, or free memory (torch.cuda.empty_cache() gives back what PyTorch keeps)"
        )


def on_all(group: dist.ProcessGroup | None, limit: float, transport: str, work: Callable[[], _Result]) -> _Result:
    """What the work returns, if it ends well on all ranks. Otherwise all get a DeviceError, so that none goes on alone.

    A rank waits for the others, whose work may not have ended, for up to `limit` seconds.
    """
    done: list[_Result] = []
    problem, cause = "", None
    try:
        done.append(work())
    except Exception as error:
        cause = error
        problem = str(error) or type(error).__name__
    for peer, reason in enumerate(_gather(_told(problem), group, limit)):
        if reason:
            done.clear()  # the error's traceback would keep it
            raise DeviceError(f"init: transport {transport!r}, rank {peer}: {reason}") from cause
    return done[0]


def _told(problem: str) -> str:
    """As much of the text as is told to the other ranks."""
    return problem.encode()[:_TOLD].decode(errors="ignore")


def _gather(text: str, group: dist.ProcessGroup | None, timeout: float) -> list[str]:
    return gather_text(text, group, timeout) if group is not None else [text]
