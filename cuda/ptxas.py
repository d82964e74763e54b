"""What ptxas says of each kernel: registers, shared memory, spills.

``ptxas.py compile nvcc ...`` runs a compilation and keeps ptxas's lines in OBJECT.ptxas.
``ptxas.py report BUILD`` prints a table of all of them, and fails where an attention kernel spills registers or where
ptxas serialises matrix products or ignores how registers are divided (its messages C7500 to C7599).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_KERNEL = re.compile(r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LOSSES = re.compile(r"\(C75\d\d\)")
_OF_PTXAS = re.compile(r"^ptxas (info|warning)|^\s+\d+ bytes stack frame|^\s*$")


@dataclass
class Kernel:
    """What became of one kernel for one architecture; bytes but for registers. Dynamic shared memory does not count."""

    name: str
    architecture: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spilled: int = 0


def parse(text: str) -> list[Kernel]:
    """The kernels in ptxas's output."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if found := _KERNEL.search(line):
            kernels.append(Kernel(found["name"], found["architecture"]))
        elif kernels and (found := _SPILLS.search(line)):
            kernels[-1].stack = int(found[1])
            kernels[-1].spilled = int(found[2]) + int(found[3])
        elif kernels and (found := _REGISTERS.search(line)):
            shared = _SHARED.search(line)
            kernels[-1].registers, kernels[-1].shared = int(found[1]), int(shared[1]) if shared else 0
    return kernels


def problems(path: str, text: str) -> list[str]:
    """What must not be in ptxas's output for an object of that path."""
    found = [f"{path}: {line.strip()}" for line in text.splitlines() if _LOSSES.search(line)]
    if "/attention/" in path:
        found += [
            f"{path}: {k.name} spills {k.spilled} bytes for {k.architecture}" for k in parse(text) if k.spilled > 0
        ]
    return found


def compile_and_keep(command: list[str]) -> int:
    """Runs nvcc; prints all it says but what ptxas tells of kernels, which lands beside the object."""
    if "-c" not in command:  # a link
        return subprocess.run(command).returncode
    done = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True)
    Path(command[command.index("-o") + 1] + ".ptxas").write_text(done.stderr)
    sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if not _OF_PTXAS.search(line))
    return done.returncode


def demangled(names: list[str]) -> list[str]:
    """The names as they are in the source, without their arguments, where there is a tool that knows."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True).stdout
    text = re.sub(r"\(anonymous namespace\)::|^void |\([^()]*\*?\)", "", text, flags=re.MULTILINE)
    return [name[:150] for name in text.splitlines()]


def report(build: Path) -> int:
    """Prints the table and what is wrong; 1 where something is."""
    wrong, rows = [], []
    for path in sorted(build.rglob("*.ptxas")):
        if not path.with_suffix("").exists():  # of a source that is gone
            continue
        text = path.read_text()
        wrong += problems(str(path.relative_to(build)), text)
        kernels = parse(text)
        rows += list(zip(demangled([k.name for k in kernels]), kernels, strict=True))
    print(f"{'architecture':<13}{'registers':>9}{'shared':>8}{'stack':>7}{'spilled':>9}  kernel")
    for name, k in rows:
        print(f"{k.architecture:<13}{k.registers:>9}{k.shared:>8}{k.stack:>7}{k.spilled:>9}  {name}")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    if not rows:
        print(f"no kernel was compiled in {build}", file=sys.stderr)
    return 1 if wrong or not rows else 0


def main(arguments: list[str]) -> int:
    """Runs one of the two commands."""
    if len(arguments) > 1 and arguments[0] == "compile":
        return compile_and_keep(arguments[1:])
    if len(arguments) == 2 and arguments[0] == "report":
        return report(Path(arguments[1]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
