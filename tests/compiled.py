"""Programs that tests compile: from all sources at once, and for all workers of a run together."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from once import made_once

COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"


def compiled_once(
    factory: pytest.TempPathFactory,
    name: str,
    sources: Sequence[Path],
    options: Sequence[str],
    link: Sequence[str] = (),
) -> Path:
    """The program."""
    return made_once(factory, name, lambda folder: _compile(folder, sources, options, link))


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
