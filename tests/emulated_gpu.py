"""The library's code for GPUs on an emulated CUDA runtime (cuda_emulation/runtime): compiled by the host's compiler."""

from __future__ import annotations

import ctypes
import re
from importlib.resources import files
from pathlib import Path

import pytest

from compiled import compiled_once

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/cuda_emulation/runtime"

_LAUNCH = re.compile(r"([\w:]+)((?:<[\w, ]+>)?)<<<(.*?)>>>\((.*?)\);", re.DOTALL)
_SHARED = re.compile(r"__shared__ ([\w:]+) (\w+);")


def for_the_host(source: str) -> str:
    """Text of a .cu file as C++: launches of kernels and shared memory in other words, in the same lines."""

    def launch(found: re.Match[str]) -> str:
        name, arguments, how, given = found.groups()
        call = f"[](auto... a) {{ {name}{arguments}(a...); }}"
        return f'emulated_gpu::launch("{name}", {{{how}}}, {call}{", " if given else ""}{given});'

    source = _SHARED.sub(r"auto& \2 = emulated_gpu::shared<\1>(__LINE__);", source)
    return _LAUNCH.sub(launch, source)


def build(factory: pytest.TempPathFactory) -> Path:
    """The shared library; see contexts.cpp for its functions."""
    folder = factory.mktemp("rewritten")
    sources = [*FOLDER.glob("*.cpp"), *(ROOT / "cuda").glob("*/*.cpp")]
    kernels = [source for source in (ROOT / "cuda").glob("*/*.cu") if source.parent.name != "attention"]
    for source in [*FOLDER.glob("*.cu"), *kernels]:
        rewritten = folder / f"{source.stem}.cpp"
        rewritten.write_text(f'#include "device.h"\n#line 1 "{source}"\n{for_the_host(source.read_text())}')
        sources.append(rewritten)
    includes = [f"-I{part}" for part in (FOLDER / "headers", FOLDER, ROOT / "cuda", ROOT / "cpp")]
    options = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-Wno-unknown-pragmas",
    ]
    package = Path(str(files("distca")))
    link = ["-L", str(package), "-ldistca", f"-Wl,-rpath,{package}", "-Wl,--no-undefined", "-lpthread"]
    return compiled_once(factory, "emulated_gpu.so", sources, [*options, *includes], link)


def load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.emulated_launches.restype = ctypes.c_int64
    return loaded
