"""Programs and libraries that tests compile: once for a state of the sources, and for all that run tests at a time.

What is compiled lies in build/tests, under a digest of the sources that the compiler has read, the names of all sources
(a new header may come before another of its name), the options and the compiler.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
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
        list_of_read = folder / "read"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process closes the file or dies
            if list_of_read.exists():
                made = folder / self._key(list_of_read.read_text().splitlines())
                if made.exists():
                    return made
            for old in folder.iterdir():  # of other sources, or left by a process that was killed
                if old.is_dir():
                    shutil.rmtree(old)
                elif old.name != "lock":
                    old.unlink()
            begun = time.time()
            with tempfile.TemporaryDirectory(dir=folder) as objects:
                program, read = self._compile(Path(objects))
                made = folder / self._key(read)
                program.rename(made)
            changed = any((ROOT / file).stat().st_mtime >= begun for file in read)
            if not changed:  # otherwise it may be made from either state
                list_of_read.write_text("".join(f"{file}\n" for file in read))
        return made

    def _key(self, read: Sequence[str]) -> str:
        """A digest of what the program is made from."""
        digest = hashlib.sha256(_version_of_compiler())
        sources = [] if callable(self.sources) else self.sources
        for part in (*_names_of_sources(), "", *map(str, sources), "", *self.options, "", *self.link):
            digest.update(part.encode() + b"\n")
        for file in read:
            if (ROOT / file).exists():  # otherwise the names differ
                digest.update(file.encode() + b"\n" + (ROOT / file).read_bytes())
        if "-march=native" in self.options:
            digest.update(_run(["-march=native", "-Q", "--help=target"]))
        return digest.hexdigest()[:16]

    def _compile(self, folder: Path) -> tuple[Path, Sequence[str]]:
        """The program, and the files of the checkout that it is made from."""
        sources, options = self.sources, list(self.options)
        if callable(sources):
            sources = sources(folder)
            options.insert(0, f"-I{folder}")
        pieces = [source if isinstance(source, Path) else _joined(source, folder) for source in sources]
        objects = [folder / f"{index}.o" for index in range(len(pieces))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [*options, "-MMD", "-c", str(of), "-o", str(to)] for of, to in zip(pieces, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        _run([*options, *map(str, objects), *self.link, "-o", str(folder / "program")])
        if callable(self.sources):  # which may read any
            return folder / "program", _names_of_sources()
        read = {file for of in objects for file in _prerequisites(of.with_suffix(".d"))}
        ours = [file for file in read if file.is_relative_to(ROOT) and not file.is_relative_to(folder)]
        return folder / "program", sorted(str(file.relative_to(ROOT)) for file in ours)


def _prerequisites(rule: Path) -> list[Path]:
    """The files that a rule for make names after its target. A backslash stands before each space in a name."""
    names = re.split(r"(?<!\\)\s+", rule.read_text().split(":", 1)[1].replace("\\\n", " ").strip())
    return [Path(name.replace("\\ ", " ")).resolve() for name in names]


@functools.cache
def _version_of_compiler() -> bytes:
    return _run(["--version"])


@functools.cache
def _names_of_sources() -> list[str]:
    files = [file for top in ("cpp", "cuda", "tests") for file in sorted((ROOT / top).rglob("*"))]
    # The last ones write sources, and say which there are.
    suffixes, writers = (".h", ".cpp", ".cu", ".cuh"), ("emulated_gpu.py", "programs.py")
    return [str(file.relative_to(ROOT)) for file in files if file.suffix in suffixes or file.name in writers]


def _joined(sources: Sequence[Path], folder: Path) -> Path:
    piece = folder / f"{sources[0].parent.name}_{sources[0].stem}.cpp"
    piece.write_text("".join(f'#include "{source}"\n' for source in sources))
    return piece


def _run(arguments: Sequence[str]) -> bytes:
    done = subprocess.run([COMPILER, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout
