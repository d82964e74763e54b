"""`distca train --trace`: what every rank did in the first steps of a run."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from distca.context import Context
from distca.trace import Trace, write_trace

TRACED_STEPS = 10


class StepTraces:
    """Records the steps of this rank until there are `TRACED_STEPS`; does nothing without a file.

    Attributes:
        everyone: on rank 0 the traces of all ranks, once they are written.
    """

    def __init__(self, context: Context, file: Path | None) -> None:
        self._context, self._file = context, file
        self._traces: list[Trace] = []
        self._begin = time.monotonic()
        self.everyone: list[Trace] = []
        if file is not None:
            context.start_trace()

    def step(self, number: int, load: int) -> None:
        """A step is over, in which the plans gave this rank `load`. After the last one rank 0 writes the file."""
        if self._file is None:
            return
        end = time.monotonic()
        self._traces.append(self._context.take_trace().of_step(number, self._begin, end, load))
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
            [sent for trace in self._traces for sent in trace.transfers],
            [sent for trace in self._traces for sent in trace.copies],
            [step for trace in self._traces for step in trace.steps],
        )
        self._traces = []
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            self.everyone = everyone
            write_trace(file, everyone)
