"""transport="nvshmem", as far as it can be tested without a GPU: it is found and linked, and mistakes are refused."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distca
from distca import _C
from distca.connect import init as connecting
from distca.connect import nvshmem
from support.processes import Group, fault_of

LIBRARY = Path(str(files("distca"))) / "libdistca_nvshmem.so"
HEADS = distca.Heads(2, 1, 16)

needs_library = pytest.mark.skipif(
    not LIBRARY.exists(), reason="distca was built without nvcc or nvidia-nvshmem-cu13: no libdistca_nvshmem"
)


def test_importing_distca_loads_nothing_of_nvshmem() -> None:
    # PyTorch's builds for CUDA load parts of NVSHMEM themselves.
    code = (
        "files = lambda: {line.split()[-1] for line in open('/proc/self/maps') if 'nvshmem' in line}\n"
        "import torch; before = files(); import distca; assert files() == before, files()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_on_the_host_are_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="moves rows between GPUs; give device='cuda'"):
        distca.init(transport="nvshmem", max_tokens=8, heads=HEADS)


def test_a_rank_that_cannot_have_the_transport_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "status", lambda: ("", "no such library"))
    with pytest.raises(distca.InvalidArgumentError, match="not available on rank 0: no such library"):
        nvshmem.connect(None, "cuda:0", "auto", "default", {"slot_bytes": 1 << 20, "timeout": 600.0})


def begin(rank: int, ranks: int, pipe: Connection) -> None:
    nvshmem.status()
    if rank == 0:
        pipe.send(_C.nvshmem_unique_id())
    unique_id = pipe.recv()
    pipe.send(fault_of(lambda: _C.nvshmem_join(rank, ranks, 0, unique_id)))
    pipe.send([_C.nvshmem_problem(rank, ranks, 0), _C.nvshmem_problem(rank, ranks + 1, 0)])


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="NVSHMEM begins on a GPU")
@pytest.mark.parametrize("ranks", [1, 2])
def test_where_nvshmem_does_not_begin_every_rank_has_an_error_and_goes_on(ranks: int) -> None:
    if nvshmem.status()[1]:
        pytest.skip(nvshmem.status()[1])
    with Group(begin, ranks, network=True) as group:
        group.tell(group.receive(0))
        for rank in range(ranks):
            kind, text = group.receive(rank)
            assert kind == "DeviceError" and f"NVSHMEM did not begin on rank {rank} of {ranks}, device 0" in text
            assert "it found its peers, but cannot use the device" in text
            with_these, with_others = group.receive(rank)
            assert with_these.startswith("device 0: ")
            assert f"NVSHMEM has begun in this process already, as PE {rank} of {ranks}" in with_others


class Calls:
    """Replaces what connects NVSHMEM and notes its arguments. `told` has what the ranks say in each exchange."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: list[list[str]]) -> None:
        self.of_connect: dict[str, Any] = {}
        self.waits: list[float] = []
        self._told = iter(told)
        monkeypatch.setattr(nvshmem, "status", lambda: ("3.4.5", ""))
        monkeypatch.setattr(nvshmem.dist, "get_rank", lambda _: 0)
        monkeypatch.setattr(nvshmem.dist, "get_world_size", lambda _: len(told[0]))
        monkeypatch.setattr(nvshmem, "gather_text", self._gather)
        monkeypatch.setattr(nvshmem.hosts, "listen", self._listen)
        monkeypatch.setattr(_C, "nvshmem_problem", lambda **_: "")
        monkeypatch.setattr(_C, "nvshmem_unique_id", lambda: b"id")
        monkeypatch.setattr(_C, "nvshmem_join", lambda **_: None)
        monkeypatch.setattr(_C, "prepare_nvshmem", self._prepare)
        monkeypatch.setattr(nvshmem, "_process", SimpleNamespace(has_heap=False))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 20, 8 << 20))

    def _prepare(self, **options: Any) -> Calls:
        if options["device"] == 9:
            raise distca.DeviceError("memory of the GPU: out of memory")
        self.of_connect = options
        return self

    def connect(self) -> str:
        return "connected"

    def _gather(self, mine: str, group: Any, timeout: float) -> list[str]:
        self.waits.append(timeout)
        return [mine, *next(self._told)[1:]]

    def _listen(self, group: Any, timeout: float) -> tuple[str, list[str]]:
        self.waits.append(timeout)
        return "listener", ["address"]

    def begin(self, timeout: float, device: str = "cuda:3") -> object:
        group: Any = object()
        return nvshmem.connect(group, device, "flash", "default", {"slot_bytes": 1 << 20, "timeout": timeout})


def test_a_rank_on_which_nvshmem_begins_is_told_on_which_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [["", "|"], ["", "NVSHMEM did not begin on rank 1 of 2"]])
    with pytest.raises(distca.DeviceError, match="'nvshmem', rank 1: NVSHMEM did not begin on rank 1 of 2"):
        calls.begin(timeout=600.0)
    assert calls.of_connect == {}
    calls = Calls(monkeypatch, [["", "|device 7: no such device"]])
    with pytest.raises(distca.InvalidArgumentError, match="not available on rank 1: device 7: no such device"):
        calls.begin(timeout=600.0)


def test_no_rank_allocates_symmetric_memory_unless_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", "waited too long for the connections of rank 0"]])
    monkeypatch.setattr(Calls, "connect", lambda _: pytest.fail("this would wait for ever"))
    with pytest.raises(distca.DeviceError, match="rank 1: waited too long for the connections of rank 0"):
        calls.begin(timeout=600.0)
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", ""]])
    with pytest.raises(distca.DeviceError, match="rank 0: memory of the GPU: out of memory") as told:
        calls.begin(timeout=600.0, device="cuda:9")
    assert str(told.value.__cause__) == "memory of the GPU: out of memory"


def test_no_rank_allocates_symmetric_memory_that_one_of_them_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", ""]])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((2 << 20) - 1, 8 << 20))
    monkeypatch.setattr(Calls, "connect", lambda _: pytest.fail("this would wait for ever"))
    with pytest.raises(distca.DeviceError, match="rank 0: the heap has 2097152 bytes, and cuda:3 has 2097151 free"):
        calls.begin(timeout=600.0)
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", ""]])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 << 20))
    monkeypatch.setattr(Calls, "connect", lambda _: "connected")
    nvshmem._process.has_heap = True  # NVSHMEM keeps the memory of a context that was closed
    assert calls.begin(timeout=600.0) == "connected"


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_several_ports_are_refused_because_rows_could_come_after_their_signal(
    value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", ""]])
    monkeypatch.setenv("NVSHMEM_IBGDA_ENABLE_MULTI_PORT", value)
    if not is_refused:
        assert calls.begin(timeout=600.0) == "connected"
        return
    with pytest.raises(distca.InvalidArgumentError, match="rank 0: NVSHMEM_IBGDA_ENABLE_MULTI_PORT is set"):
        calls.begin(timeout=600.0)


def test_all_ranks_are_told_that_two_cannot_open_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    request = connecting._Request(
        None, 2, "cuda-ipc", "mine", "cuda:0", "auto", None, progress_thread=False, link=None, timeout=1.0, options={}
    )
    monkeypatch.setattr(_C, "remove_context", removed.append)
    monkeypatch.setattr(_C, "connect_ipc", lambda **_: "connected")
    monkeypatch.setattr(nvshmem, "_gather", lambda mine, group, limit: [mine, "reaching the memory of another"])
    with pytest.raises(distca.DeviceError, match="init: transport 'cuda-ipc', rank 1: reaching the memory of another"):
        connecting._over_ipc(request, {"connect_timeout": 1.0})
    assert removed == ["mine"]

    def never(**_: Any) -> None:
        raise distca.PeerTimeoutError("rank 1 did not come")

    monkeypatch.setattr(_C, "connect_ipc", never)
    with pytest.raises(distca.PeerTimeoutError, match="rank 1 did not come"):
        connecting._over_ipc(request, {"connect_timeout": 1.0})
    assert removed == ["mine"]


@pytest.mark.parametrize(("timeout", "expected"), [(5.0, 5.0), (600.0, 120.0)])
def test_ranks_wait_for_each_other_no_longer_than_the_timeout_says(
    timeout: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, [["", "|"], ["", ""], ["", ""]])
    assert calls.begin(timeout) == "connected"
    assert calls.of_connect["connect_timeout"] == expected and calls.of_connect["timeout"] == timeout
    assert calls.waits == [timeout, timeout, timeout, timeout + expected]  # the last one for ranks that still connect


@needs_library
def test_a_rank_whose_peer_does_not_come_gives_up_when_it_was_told_to() -> None:
    if nvshmem.status()[1]:
        pytest.skip(nvshmem.status()[1])
    mine, other = _C.ShmListener(), _C.ShmListener()
    options: dict[str, Any] = {"rank": 0, "num_ranks": 2, "device": 0, "attention": "flash", "put_blocks": 0}
    options |= {"slot_bytes": 1 << 16, "timeout": 600.0, "connect_timeout": 0.05, "cost": distca.CostModel().core}
    with pytest.raises(distca.PeerTimeoutError, match="waited too long for the connections of rank 1"):
        _C.prepare_nvshmem(listener=mine, addresses=[mine.address, other.address], name="never", **options)


@pytest.mark.parametrize(("text", "expected"), [("1", 1 << 30), ("0.5", 1 << 29), ("40", 40 << 30)])
def test_the_heap_has_the_size_that_the_released_distca_reads(
    text: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB", text)
    assert nvshmem.heap_bytes_of_environment() == expected
    monkeypatch.delenv("EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB")
    assert nvshmem.heap_bytes_of_environment() is None


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf"])
def test_a_size_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB", text)
    with pytest.raises(distca.InvalidArgumentError, match="EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB = "):
        nvshmem.heap_bytes_of_environment()


@needs_library
def test_the_library_exports_its_entry_alone_and_carries_the_cuda_runtime() -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    functions = [line.split()[2] for line in symbols.splitlines() if line.split()[1] == "T"]
    assert functions == ["distca_nvshmem_library"]
    dynamic = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert "libnvshmem_host.so.3" in needed and not [name for name in needed if "cudart" in name or "libcuda." in name]
    assert "[$ORIGIN:$ORIGIN/../nvidia/nvshmem/lib]" in dynamic


@needs_library
def test_the_library_loads_where_nvshmem_is_and_says_its_version() -> None:
    version, problem = nvshmem.status()
    if "libnvshmem_host.so.3" in problem:
        pytest.skip("nvidia-nvshmem-cu13 is not installed for this Python")
    assert problem == "" and version.startswith("3.")
    assert _C.nvshmem_status() == (version, "")


def _version_seen(rank: int, ranks: int, pipe: Connection) -> None:
    ctypes.CDLL(pipe.recv(), ctypes.RTLD_GLOBAL)
    pipe.send(nvshmem.status())


@needs_library
def test_nvshmem_of_another_minor_version_than_that_of_the_build_is_refused(tmp_path: Path) -> None:
    """NVSHMEM takes device code that is older than its host library, though their queue pairs differ since 3.5.19."""
    if nvshmem.library_folder() is None:
        pytest.skip("nvidia-nvshmem-cu13 is not installed for this Python")
    built, problem = nvshmem.status()
    assert problem == ""
    major, minor, _ = map(int, built.split("."))
    source = tmp_path / "version.c"
    for loaded in ((major, minor, 99), (major, minor + 1, 0), (major + 1, minor, 0)):
        name = ".".join(map(str, loaded))
        other = tmp_path / f"version-{name}.so"
        numbers = "*major = {}; *minor = {}; *patch = {};".format(*loaded)
        source.write_text(
            f"void nvshmemx_vendor_get_version_info(int *major, int *minor, int *patch) {{ {numbers} }}\n"
        )
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", other, source], check=True)
        with Group(_version_seen, 1, network=True) as group:
            group.send(0, str(other))
            found = group.receive(0)
        if loaded[:2] == (major, minor):
            assert found == (name, "")
        else:
            assert found[0] == "" and found[1].startswith(f"distca was built with NVSHMEM {major}.{minor}.")
            assert f", and {name} is loaded; the first two numbers must be the same. Build distca where" in found[1]
