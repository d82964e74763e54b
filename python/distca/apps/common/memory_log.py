"""`distca train --log-memory`: the memory of every rank at points of each step. `pretrain_llama.py` has it too."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch

from distca.apps.common.files import writing
from distca.context import Context
from distca.planner.memory import SLOTS

VARIABLE = "EXPERIMENT_LOG_MEMORY_USAGE"


class Watch:
    """The base class of observers that are told how far a step has come. It does nothing."""

    def begin(self, arenas: Callable[[int], dict[str, int]]) -> None:
        """Forward of a micro-batch, or an iteration, begins.

        `arenas` tells the bytes that its plans take of the heap on a rank of the context, in each phase.
        """

    def note(self, point: str) -> None:
        """A point of the step is over: forward, backward or optimizer."""


UNWATCHED = Watch()


class MemoryLog(Watch):
    """Writes a line of JSON for each point of a step to a rank's file. It does nothing without a file.

    Points are the begin of a micro-batch, the ends of its forward and backward, and the end of the optimizer's step. A
    line has the step, the point, and these bytes:

    - ``rss``: resident memory of the process; ``rss_shared``: its part that is shared with others, such as the heaps of
      shm; ``rss_peak``: its peak.
    - ``heap``: distca's heap, both slots, and 0 without a context; ``arena_forward`` and ``arena_backward``: what the
      step's plans take of it on this rank.
    - ``cuda_allocated``, ``cuda_reserved`` and ``cuda_peak``: those of torch's allocator, if CUDA is in use.
    """

    def __init__(self, file: Path | None, context: Context | None) -> None:
        self._path = file
        self._file: TextIO | None = None
        self._number = 0
        self._step: dict[str, int] = {}
        self._heap, self._rank = (0, 0) if context is None else (SLOTS * context.slot_bytes, context.rank)

    def __enter__(self) -> MemoryLog:
        if self._path is not None:
            with writing(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a line that could not be written was reported then
                self._file.close()

    def step(self, number: int) -> None:
        """Notes that step `number` begins."""
        self._number = number

    def begin(self, arenas: Callable[[int], dict[str, int]]) -> None:
        if self._file is None:
            return
        taken = {f"arena_{phase}": size for phase, size in arenas(self._rank).items()}
        self._step = {"step": self._number, "heap": self._heap, **taken}
        self.note("begin")

    def note(self, point: str) -> None:
        if self._file is None or self._path is None:
            return
        line = {**self._step, "point": point, **resident()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            line["cuda_allocated"] = torch.cuda.memory_allocated()
            line["cuda_reserved"] = torch.cuda.memory_reserved()
            line["cuda_peak"] = torch.cuda.max_memory_allocated()
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


_RESIDENT = {"VmRSS": "rss", "RssShmem": "rss_shared", "VmHWM": "rss_peak"}


def resident() -> dict[str, int]:
    """Memory of this process in bytes: ``rss``, ``rss_shared`` and ``rss_peak``. Linux tells it in kilobytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _RESIDENT:
            found[_RESIDENT[name]] = 1024 * int(value.split()[0])
    return found
