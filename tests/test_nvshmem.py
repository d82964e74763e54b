"""transport="nvshmem" as far as it goes without a GPU: it is found, linked and refused as it should be."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import distca
from distca import _C, nvshmem

LIBRARY = Path(str(files("distca"))) / "libdistca_nvshmem.so"
HEADS = distca.Heads(2, 1, 16)

needs_library = pytest.mark.skipif(
    not LIBRARY.exists(), reason="distca was built without nvcc or nvidia-nvshmem-cu13: no libdistca_nvshmem"
)


def test_importing_distca_loads_nothing_of_nvshmem() -> None:
    # PyTorch's builds for CUDA load some of it themselves.
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
    with pytest.raises(distca.InvalidArgumentError, match="not to be had on rank 0: no such library"):
        nvshmem.connect(None, "cuda:0", "auto", "default", {"slot_bytes": 1 << 20})


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
