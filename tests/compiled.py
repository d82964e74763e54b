"""Programs that tests compile: from all sources at once, and for all workers of a run together."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"


def compiled_once(
    factory: pytest.TempPathFactory,
    name: str,
    sources: Sequence[Path],
    options: Sequence[str],
    link: Sequence[str] = (),
) -> Path:
    """The program, in the folder of this run of pytest. The worker that comes first compiles it, others wait."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    program = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the worker closes it, or dies
        if not program.exists():
            _compile(factory.mktemp(name), sources, options, link).rename(program)
    return program


def _compile(folder: Path, sources: Sequence[Path], options: Sequence[str], link: Sequence[str]) -> Path:
    objects = [folder / f"{index}.o" for index in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*options, "-c", str(of), "-o", str(to)] for of, to in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
    _run([*options, *map(str, objects), *link, "-o", str(folder / "program")])
    return folder / "program"


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
