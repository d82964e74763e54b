"""Programs that tests compile from all sources at once, and once for all workers of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.once import made_once

Source = Path | Sequence[Path]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"


def compiled_once(
    factory: pytest.TempPathFactory,
    name: str,
    sources: Sequence[Source],
    options: Sequence[str],
    link: Sequence[str] = (),
) -> Path:
    """The path of the compiled program. A list of files in place of one is compiled as one piece, because headers take
    most of the time.
    """
    return made_once(factory, name, lambda folder: _compile(folder, sources, options, link))


def _compile(folder: Path, sources: Sequence[Source], options: Sequence[str], link: Sequence[str]) -> Path:
    pieces = [source if isinstance(source, Path) else _joined(source, folder) for source in sources]
    objects = [folder / f"{index}.o" for index in range(len(pieces))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*options, "-c", str(of), "-o", str(to)] for of, to in zip(pieces, objects, strict=True)]
        list(pool.map(_run, commands))
    _run([*options, *map(str, objects), *link, "-o", str(folder / "program")])
    return folder / "program"


def _joined(sources: Sequence[Path], folder: Path) -> Path:
    piece = folder / f"{sources[0].parent.name}_{sources[0].stem}.cpp"
    piece.write_text("".join(f'#include "{source}"\n' for source in sources))
    return piece


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
