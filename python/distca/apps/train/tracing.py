"""`distca train --trace`: records what every rank did in the first steps of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from distca.apps.common.files import writing
from distca.apps.common.memory_log import Watch
from distca.context import Context
from distca.trace.timeline import TRACE
from distca.trace.trace import Trace, TrainingPhase, write_trace

TRACED_STEPS = 10


def trace_files(run_dir: Path, option: str | None) -> list[Path]:
    """The files of a run's trace; none without the option."""
    return [] if option is None else [run_dir / TRACE, *([Path(option)] if option else [])]


class _Phases(Watch):
    """Adds the phases of micro-batches to a list."""

    def __init__(self, phases: list[TrainingPhase], other: Watch) -> None:
        self._phases, self._other = phases, other
        self._at = 0.0

    def begin(self, arenas: Callable[[int], dict[str, int]]) -> None:
        self._at = time.monotonic()
        self._other.begin(arenas)

    def note(self, point: str) -> None:
        self._other.note(point)
        begin, self._at = self._at, time.monotonic()
        self._phases.append(TrainingPhase(point, begin, self._at))


class StepTraces:
    """Records the steps of this rank until there are `TRACED_STEPS`. It does nothing without files to write.

    Attributes:
        everyone: on rank 0 the traces of all ranks, once they are written.
    """

    def __init__(self, context: Context, files: Sequence[Path]) -> None:
        self._context, self._files = context, files
        self._traces: list[Trace] = []
        self._begin = time.monotonic()
        self._phases: list[TrainingPhase] = []
        self.everyone: list[Trace] = []
        if files:
            context.start_trace()

    def watch(self, other: Watch) -> Watch:
        """The observer to which a step reports its points. It passes them on to `other`.

        A phase ends at its point and begins at the point before. The first phase begins when a micro-batch and its
        plans are there.
        """
        return _Phases(self._phases, other) if self._files else other

    def step(self, number: int, load: int) -> None:
        """Records a step that is over. The plans gave this rank `load` in it. After the last one rank 0 writes them."""
        if not self._files:
            return
        end = time.monotonic()
        self._traces.append(self._context.take_trace().of_step(number, self._begin, end, load, [*self._phases]))
        self._begin = end
        self._phases.clear()
        if len(self._traces) == TRACED_STEPS:
            self.write()

    def skip(self) -> None:
        """Drops what was recorded since the last step: it belongs to no step."""
        if self._files:
            self._context.take_trace()
            self._begin = time.monotonic()

    def write(self) -> None:
        """Writes what all ranks have recorded, on rank 0, unless that was done. It is collective."""
        if not self._files:
            return
        self._context.stop_trace()
        files, self._files = self._files, ()
        # With tensor parallelism several contexts have a rank of that number.
        of_rank = self._context.global_ranks
        mine = Trace(
            dist.get_rank(),
            [
                span._replace(peer=of_rank[span.peer] if span.peer >= 0 else -1)
                for trace in self._traces
                for span in trace.spans
            ],
            [sent._replace(peer=of_rank[sent.peer]) for trace in self._traces for sent in trace.transfers],
            [sent._replace(peer=of_rank[sent.peer]) for trace in self._traces for sent in trace.copies],
            [step for trace in self._traces for step in trace.steps],
            [phase for trace in self._traces for phase in trace.phases],
        )
        self._traces = []
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            self.everyone = everyone
            for file in files:
                with writing(file):
                    write_trace(file, everyone)
