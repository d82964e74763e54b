"""The code for GPUs, as far as a machine without one can test it: the library loads, and its build is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
import torch

import distca
from distca import _C

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(str(files("distca"))) / "libdistca_cuda.so"

needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="distca was built without nvcc: no libdistca_cuda")


def _load_ptxas() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ptxas", ROOT / "cuda" / "ptxas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ptxas"] = module
    spec.loader.exec_module(module)
    return module


ptxas = _load_ptxas()

# This is what nvcc 13.0 prints for two kernels, one of which spills.
OUTPUT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4calmPf' for 'sm_90a'
ptxas info    : Function properties for _Z4calmPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compile time = 12.3 ms
ptxas info    : Compiling entry function '_Z6spillsPf' for 'sm_90a'
ptxas info    : Function properties for _Z6spillsPf
    144 bytes stack frame, 140 bytes spill stores, 136 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 144 bytes cumulative stack size
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x\n"
)


def test_the_report_has_registers_shared_memory_and_spills_of_each_kernel() -> None:
    calm, spills = ptxas.parse(OUTPUT)
    assert (calm.name, calm.architecture, calm.registers, calm.shared) == ("_Z4calmPf", "sm_90a", 168, 1024)
    assert (calm.stack, calm.spilled) == (0, 0)
    assert (spills.name, spills.registers, spills.shared) == ("_Z6spillsPf", 255, 0)
    assert (spills.stack, spills.spilled) == (144, 276)


@pytest.mark.parametrize(
    ("folder", "text", "message"),
    [
        ("attention", OUTPUT, "_Z6spillsPf spills 276 bytes for sm_90a"),
        ("runtime", OUTPUT, None),  # a spill only makes this kernel slow, so the check passes
        ("runtime", SERIALISED, "C7510"),
        ("attention", SERIALISED.replace("C7510", "C7512"), "C7512"),
        ("attention", OUTPUT.split("ptxas info    : Compiling entry function '_Z6")[0], None),
    ],
    ids=["a spill in attention", "a spill elsewhere", "serialised products", "for want of registers", "neither"],
)
def test_the_report_fails_for_spills_in_attention_and_serialised_products(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], folder: str, text: str, message: str | None
) -> None:
    target = tmp_path / "cuda" / folder / "kernel.cu.o"
    target.parent.mkdir(parents=True)
    target.touch()
    Path(f"{target}.ptxas").write_text(OUTPUT.split("ptxas info    : Compiling entry function '_Z6")[0] + text)
    assert ptxas.report(tmp_path) == (0 if message is None else 1)
    output = capfd.readouterr()
    assert "168" in output.out
    assert message is None or message in output.err


def test_a_report_of_nothing_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ptxas.report(tmp_path) == 1
    assert "no kernel was compiled" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_the_compiler_runs_as_it_was_called_and_its_warnings_are_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/arguments"\ncat "{tmp_path}/said" >&2\nexit {code}\n')
    compiler.chmod(0o755)
    (tmp_path / "said").write_text(OUTPUT + "kernel.cu(3): warning: something\n")
    target = tmp_path / "kernel.o"
    assert ptxas.main(["compile", str(compiler), "-c", "kernel.cu", "-o", str(target)]) == code
    assert (tmp_path / "arguments").read_text().split() == ["-c", "kernel.cu", "-o", str(target), "-Xptxas=-v"]
    assert capfd.readouterr().err == "kernel.cu(3): warning: something\n"
    assert len(ptxas.parse(Path(f"{target}.ptxas").read_text())) == 2


def test_the_status_says_whether_the_library_is_there() -> None:
    built, count, problem = _C.cuda_status()
    assert built == LIBRARY.exists()
    if not built:
        assert "libdistca_cuda.so" in problem
    assert (count > 0) == (problem == "")


@needs_library
def test_a_fresh_process_imports_without_the_library_and_loads_it_on_demand() -> None:
    code = (
        "import distca; from distca import _C; maps = lambda: 'libdistca_cuda' in open('/proc/self/maps').read()\n"
        "assert not maps(); print(*_C.cuda_status()); assert maps()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        assert re.match(r"True 0 \w+", done.stdout), done.stdout


@needs_library
def test_the_library_needs_neither_a_driver_nor_a_cuda_runtime_to_load() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is missing")
    text = subprocess.run([readelf, "-d", "-W", LIBRARY], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert [name for name in needed if "cuda" in name or "nv" in name] == []
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text) == ["$ORIGIN"]


@needs_library
def test_the_library_gives_away_its_entry_alone_and_no_path_of_its_build() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is missing")
    text = subprocess.run([nm, "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True).stdout
    names = [line.split()[2] for line in text.splitlines() if line.split()[1] == "T"]
    assert names == ["distca_cuda_library"]
    content = LIBRARY.read_bytes()
    for path in (ROOT, Path(sys.prefix), Path(torch.__file__).parent):
        assert os.fsencode(str(path)) + b"/" not in content, path


@needs_library
@pytest.mark.skipif("TORCH_CUDA_ARCH_LIST" in os.environ, reason="TORCH_CUDA_ARCH_LIST names others")
def test_rows_are_compiled_for_every_supported_architecture() -> None:
    content = LIBRARY.read_bytes()
    for architecture in (b"sm_80", b"sm_90", b"sm_100"):
        assert architecture in content


def test_the_typed_error_of_a_device_is_exported() -> None:
    assert issubclass(distca.DeviceError, distca.DistcaError)
