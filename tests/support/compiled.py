"""Programs and libraries that tests compile: once for a state of the sources, and for all that run tests at a time.

What is compiled lies in build/tests, under a digest of all C++ and CUDA sources, the options and the compiler.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"
_FOLDER = ROOT / "build" / "tests"

Source = Path | Sequence[Path]


@dataclass(frozen=True)
class Program:
    """A program or library.

    Attributes:
        name: of the file.
        sources: a list of files in place of one is compiled as one piece, because headers take most of the time. A
            function makes them in a folder, which is a folder of headers too.
        options: of the compiler.
        link: options of the linker.
    """

    name: str
    sources: Sequence[Source] | Callable[[Path], Sequence[Source]]
    options: Sequence[str]
    link: Sequence[str] = ()

    def path(self) -> Path:
        """Where it is. Compiles it if the sources have changed; skips the test where there is no compiler."""
        if shutil.which(COMPILER) is None:
            pytest.skip("there is no C++ compiler here")
        return self.compiled()

    def compiled(self) -> Path:
        """Where it is, compiled if the sources have changed."""
        folder = _FOLDER / self.name
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / self._key()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process closes the file or dies
            if not made.exists():
                for old in folder.iterdir():  # of other sources, or left by a process that was killed
                    if old.is_dir():
                        shutil.rmtree(old)
                    elif old.name != "lock":
                        old.unlink()
                with tempfile.TemporaryDirectory(dir=folder) as objects:
                    self._compile(Path(objects)).rename(made)
        return made

    def _key(self) -> str:
        digest = hashlib.sha256(_state_of_sources())
        for part in (*self.options, "", *self.link):
            digest.update(part.encode() + b"\n")
        if "-march=native" in self.options:
            digest.update(_run(["-march=native", "-Q", "--help=target"]))
        return digest.hexdigest()[:16]

    def _compile(self, folder: Path) -> Path:
        sources, options = self.sources, list(self.options)
        if callable(sources):
            sources = sources(folder)
            options.insert(0, f"-I{folder}")
        pieces = [source if isinstance(source, Path) else _joined(source, folder) for source in sources]
        objects = [folder / f"{index}.o" for index in range(len(pieces))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*options, "-c", str(of), "-o", str(to)] for of, to in zip(pieces, objects, strict=True)]
            list(pool.map(_run, commands))
        _run([*options, *map(str, objects), *self.link, "-o", str(folder / "program")])
        return folder / "program"


@functools.cache
def _state_of_sources() -> bytes:
    digest = hashlib.sha256(_run(["--version"]))
    for top in ("cpp", "cuda", "tests"):
        for file in sorted((ROOT / top).rglob("*")):
            # These write sources, and say which there are.
            if file.suffix in (".h", ".cpp", ".cu", ".cuh") or file.name in ("emulated_gpu.py", "programs.py"):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\n" + file.read_bytes())
    return digest.digest()


def _joined(sources: Sequence[Path], folder: Path) -> Path:
    piece = folder / f"{sources[0].parent.name}_{sources[0].stem}.cpp"
    piece.write_text("".join(f'#include "{source}"\n' for source in sources))
    return piece


def _run(arguments: Sequence[str]) -> bytes:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout
