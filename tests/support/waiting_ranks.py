"""Functions of ranks that wait until a signal ends them. Scripts import this module, which therefore loads little."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch.distributed as dist


def writes_pid_and_waits(folder: str) -> str:
    Path(folder, f"{dist.get_rank()}.tmp").write_text(str(os.getpid()))
    Path(folder, f"{dist.get_rank()}.tmp").rename(Path(folder, f"{dist.get_rank()}.pid"))
    threading.Event().wait()
    return "unreachable"


def finishes_on_interrupt(folder: str) -> str:
    try:
        return writes_pid_and_waits(folder)
    except KeyboardInterrupt:
        return "stopped cleanly"


def ignores_interrupts(folder: str) -> str:
    try:
        return writes_pid_and_waits(folder)
    except KeyboardInterrupt:
        Path(folder, f"{dist.get_rank()}.interrupted").touch()
        threading.Event().wait()
        return "unreachable"
