"""Plants faults in the sources, one at a time, and requires that the tests catch each.

    make faults                     all of them
    make faults ARGS="--list"       their names
    make faults ARGS="--only NAME"  one
    make faults ARGS="--part 1/3"   a third of them; 2/3 and 3/3 are the others
    make faults ARGS="--jobs 1"     one after the other; by default as many at once as there are cores

Each job works on a copy of the tree in a temporary folder. It builds the copy once, and again for each fault in C++. If
no fault is in C++, it takes the libraries that are built in the tree.
The tests that should notice a fault run first. If they pass, the whole suite runs. The program prints which test
noticed a fault. It exits with 1 if a fault survives, or if the tests fail without one. A fault that makes tests hang is
noticed; on a busy machine tests may also be slow, so the program says how many were noticed in that way alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from faults import FAULTS
from faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
NO_ANSWER = "no answer"
LIMIT = 300.0
"""The limit of one run of tests in seconds. A run that takes longer hangs, and counts as having noticed the fault."""
WHOLE_LIMIT = 3600.0
"""The limit of a run of the whole suite, and of all that should notice one of the faults."""


def tool(name: str) -> str:
    """The program installed beside this Python, or otherwise the one on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"{name} is missing; make build installs it")
    return found


class Copy:
    """A copy of the tree, with its own build or, without `builds`, with the libraries of the tree."""

    def __init__(self, folder: Path, build_jobs: int, *, builds: bool) -> None:
        self.build_jobs = build_jobs
        self.builds = builds
        self.output = ""  # the output of the last run of tests
        self.tree = folder / "tree"
        self.build_folder = folder / "build"
        made_by_tools = [".git", ".venv", "build", "dist", "runs", "logs", "*.egg-info", "__pycache__", ".*_cache"]
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*made_by_tools, *(["*.so"] if builds else [])))
        self.environment = {**os.environ, "PYTHONPATH": str(self.tree / "python"), "PYTHONDONTWRITEBYTECODE": "1"}

    def prepare(self) -> None:
        if self.builds:
            self.configure()
        where = self._run([sys.executable, "-c", "import distca; print(distca.__file__)"])
        if not Path(where.strip()).is_relative_to(self.tree):
            raise SystemExit(f"the tests would import {where.strip()} instead of the copy in {self.tree}")

    def configure(self) -> None:
        ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
        python = f"-DPython_EXECUTABLE={sys.executable}"
        cuda = f"-DDISTCA_CUDA={'OFF' if os.environ.get('DISTCA_CUDA') == '0' else 'AUTO'}"
        folders = ["-S", str(self.tree), "-B", str(self.build_folder)]
        self._run([tool("cmake"), *folders, "-G", "Ninja", ninja, python, cuda])
        self.build()

    def build(self) -> None:
        self._run([tool("cmake"), "--build", str(self.build_folder), "--parallel", str(self.build_jobs)])
        self._run(
            [tool("cmake"), "--install", str(self.build_folder), "--prefix", str(self.tree / "python" / "distca")]
        )

    def _run(self, command: list[str]) -> str:
        ran = subprocess.run(
            command, cwd=self.tree, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if ran.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}")
        return ran.stdout

    def failing_test(self, tests: tuple[str, ...], limit: float = LIMIT) -> str:
        """The first test that fails, or what else went wrong; empty if all pass."""
        # Without the tests of the list of faults: they miss the piece that a planted fault replaced.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--ignore=tests/faults",
            *tests,
        ]
        with tempfile.TemporaryFile() as said:  # a pipe would be open for as long as any process that a fault leaves
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"{NO_ANSWER} in {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            output = said.read().decode(errors="replace")
        self.output = output
        if process.returncode == 0:
            return ""
        if process.returncode in (4, 5):
            raise SystemExit(f"pytest found no tests in {' '.join(tests)}:\n{output}")
        named = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", output, re.MULTILINE)
        return named[1] if named else f"the end of pytest with code {process.returncode}"

    def noticed(self, fault: Fault) -> str:
        """What notices the fault; empty if nothing does. The source is restored afterwards."""
        path, text = fault.planted(self.tree)
        source = path.read_text()
        path.write_text(text)
        try:
            if path.suffix != ".py":
                self.build()
            return self.failing_test(fault.tests) or self.failing_test(("tests",), WHOLE_LIMIT)
        finally:
            path.write_text(source)


def part_of(text: str) -> tuple[int, int]:
    """The numbers of K/N: the K-th of N parts."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(match[1]), int(match[2])


def of_part(faults: list[Fault], part: int, parts: int) -> list[Fault]:
    """The faults of the `part`-th of so many parts, which differ by one fault at most."""
    return faults[len(faults) * (part - 1) // parts : len(faults) * part // parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="plant this fault (may be given again)")
    parser.add_argument(
        "--part", metavar="K/N", type=part_of, default="1/1", help="plant the K-th of N parts of the list"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="so many faults at once")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{fault.name:<60} {fault.file}" for fault in FAULTS))
        return 0
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}; 1 or more are allowed")
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    chosen = of_part(chosen, *options.part)
    if not chosen:
        part = "{}/{}".format(*options.part)
        parser.error(f"part {part} has no fault that is called {options.only}; --list says which there are")
    for fault in chosen:  # checks all faults before anything takes time
        try:
            fault.planted(ROOT)
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None
    jobs = min(options.jobs, len(chosen))
    with tempfile.TemporaryDirectory(prefix="distca-faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        cores = os.cpu_count() or 1
        builds = any(not fault.file.endswith(".py") for fault in chosen)
        copies = [Copy(Path(folder) / str(job), max(1, cores // jobs), builds=builds) for job in range(jobs)]
        list(pool.map(Copy.prepare, copies))
        files = sorted({test for fault in chosen for test in fault.tests})
        shares = [tuple(files[job::jobs]) for job in range(min(jobs, len(files)))]
        failures = list(pool.map(lambda copy, share: copy.failing_test(share, WHOLE_LIMIT), copies, shares))
        if failure := next(filter(None, failures), ""):
            print(*(copy.output for copy, failed in zip(copies, failures, strict=False) if failed), sep="\n")
            print(f"the tests fail without any fault: {failure}")
            return 1
        print(f"{'fault':<60} {'file':<36} {'seconds':>7}  caught by", flush=True)
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def how_caught(fault: Fault) -> str:
            copy = free.get()
            begin = time.monotonic()
            caught = copy.noticed(fault)
            free.put(copy)
            seconds = time.monotonic() - begin
            print(f"{fault.name:<60} {fault.file:<36} {seconds:7.1f}  {caught or 'NOTHING'}", flush=True)
            return caught

        how = list(pool.map(how_caught, chosen))
    silent = sum(one.startswith(NO_ANSWER) for one in how)
    print(f"{sum(map(bool, how))} of {len(chosen)} faults were caught, {silent} of them by tests that did not end")
    return 0 if all(how) else 1


if __name__ == "__main__":
    sys.exit(main())
