"""`distca train --trace FILE`: what every rank did in the first steps of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from distca.context import Context
from distca.trace import Span, Trace, write_trace

TRACED_STEPS = 10


class StepTraces:
    """Records the steps of this rank until there are `TRACED_STEPS`; does nothing without a file."""

    def __init__(self, context: Context, file: Path | None) -> None:
        self._context, self._file = context, file
        self._traces: list[Trace] = []
        self._begin = time.monotonic()
        if file is not None:
            context.start_trace()

    def step(self) -> None:
        """A step is over. After the last one that is recorded rank 0 writes the file."""
        if self._file is None:
            return
        end = time.monotonic()
        self._traces.append(with_compute(self._context.take_trace(), self._begin, end))
        self._begin = end
        if len(self._traces) == TRACED_STEPS:
            self.write()

    def write(self) -> None:
        """Rank 0 writes what all ranks have recorded, unless it has. Collective."""
        if self._file is None:
            return
        self._context.stop_trace()
        file, self._file = self._file, None
        mine = Trace(
            self._context.rank,
            [span for trace in self._traces for span in trace.spans],
            [transfer for trace in self._traces for transfer in trace.transfers],
        )
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            write_trace(file, everyone)


def with_compute(trace: Trace, begin: float, end: float) -> Trace:
    """The trace of the seconds [begin, end), with what lies between the parts of its steps as spans ``compute``."""
    parts = sorted((span for span in trace.spans if not span.is_wait), key=lambda span: span.begin)
    phases = [span.phase for span in parts] or ["forward"]
    ends = [begin, *(span.end for span in parts)]
    begins = [*(span.begin for span in parts), end]
    gaps = [
        Span("compute", False, -1, -1, phase, -1, after, before)
        for phase, after, before in zip([*phases, phases[-1]], ends, begins, strict=False)
        if before > after
    ]
    return replace(trace, spans=_in_order([*trace.spans, *gaps]))


def _in_order(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.begin, -span.end))
