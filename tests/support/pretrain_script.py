"""`pretrain_llama.sh` as tests start it, and the processes of this machine that it has started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_llama.sh")
VARIABLES = {
    "PYTHON": sys.executable,
    "NNODES": "2",
    "PP_SIZE": "2",
    "TOKENS_PER_RANK": "128",
}


def outside_of_slurm() -> dict[str, str]:
    """The environment without what a job of Slurm would have in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def start(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts the script for two CPU ranks, whose run is `folder / "run"`."""
    return subprocess.Popen(
        ["bash", SCRIPT],
        env=outside_of_slurm() | VARIABLES | {"NNODES": "1", "RUN_DIR": str(folder / "run")} | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_until(process: subprocess.Popen[str], what: str) -> list[str]:
    """What the process prints until a line begins with the pattern, or to its end."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if re.match(what, line):
            break
    return lines


def processes() -> list[int]:
    """The ids of all processes of the machine."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def name_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_of(command: int, pid: int) -> bool:
    """Whether a command has started the process, or has started what it was forked from."""
    return command in (parent_of(pid), parent_of(parent_of(pid)))


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def is_rank(pid: int, job: int) -> bool:
    """Whether the process is a rank that the job of Slurm has started."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"pretrain_llama.py" in command and f"SLURM_JOB_ID={job}\0".encode() in environment_of(pid)
