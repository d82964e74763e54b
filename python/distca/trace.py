"""What ranks did when: the parts of their steps, what they waited for, and what travelled meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_PHASES = ("forward", "backward")


@dataclass(frozen=True)
class Link:
    """An emulated network link, for tests and benchmarks; `distca.init` and `distca.loopback` take one.

    Rows leave a rank one after another at the link's speed and arrive a latency later, while the rank computes. A
    signal arrives a latency after it was sent, but not before rows that were sent to that rank earlier.

    Attributes:
        bytes_per_second: of everything that leaves a rank.
        latency: seconds.
        signal_only: every message takes the link's time of one byte (its rows arrive all the same).
    """

    bytes_per_second: float
    latency: float = 0.0
    signal_only: bool = False

    @property
    def words(self) -> tuple[float, float, bool]:
        """As ``_C`` takes it."""
        return (float(self.bytes_per_second), float(self.latency), self.signal_only)


class Span(NamedTuple):
    """Seconds [begin, end) of a rank's thread, by the monotonic clock, which the processes of a host share."""

    #: ``dispatch``, ``attend`` or ``collect``; of a wait, what was waited for in one of them.
    name: str
    is_wait: bool
    step: int
    slot: int
    phase: str
    #: Who was waited for; -1 where it is nobody.
    peer: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class LinkTransfer(NamedTuple):
    """Rows on a rank's emulated link, seconds [begin, end) as in `Span`."""

    peer: int
    bytes: int
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What one rank did between two calls of `Context.take_trace`."""

    rank: int
    spans: list[Span]
    transfers: list[LinkTransfer]

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for others or for its own rows to arrive."""
        return sum(span.seconds for span in self.spans if span.is_wait)

    @property
    def attending(self) -> float:
        """Seconds of computing attention."""
        waits = sum(span.seconds for span in self._waits_in("attend"))
        return sum(span.seconds for span in self.spans if span.name == "attend" and not span.is_wait) - waits

    @property
    def traffic(self) -> float:
        """Seconds in which rows left over the emulated link; 0 without one."""
        return sum(transfer.end - transfer.begin for transfer in self.transfers)

    @property
    def hidden(self) -> float:
        """Share of `traffic` that did not make this rank wait: 1 - exposed / traffic; 1 where nothing travelled.

        Negative where it waited longer for other reasons.
        """
        return 1.0 - self.exposed / self.traffic if self.traffic > 0 else 1.0

    def _waits_in(self, name: str) -> Iterable[Span]:
        parts = [span for span in self.spans if span.name == name and not span.is_wait]
        for wait in (span for span in self.spans if span.is_wait):
            if any(part.begin <= wait.begin and wait.end <= part.end for part in parts):
                yield wait


def write_trace(path: str | Path, traces: Sequence[Trace]) -> None:
    """Writes ranks' traces as one JSON file of Chrome's trace format, which Perfetto and ``chrome://tracing`` open.

    A rank is a process there: its first thread has the parts of steps with the waits in them, its second one the link.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        events.append(_label("process_name", trace.rank, 0, f"rank {trace.rank}"))
        events.append(_label("thread_name", trace.rank, 0, "steps"))
        for span in trace.spans:
            arguments: dict[str, int | str] = {
                "step": span.step,
                "slot": span.slot,
                "phase": span.phase,
                "peer": span.peer,
            }
            name = f"wait for {span.name}" if span.is_wait else f"{span.name} {span.phase}"
            category = "wait" if span.is_wait else "step"
            events.append(_event(name, category, trace.rank, 0, span.begin, span.end, arguments))
        if trace.transfers:
            events.append(_label("thread_name", trace.rank, 1, "link"))
        for sent in trace.transfers:
            size: dict[str, int | str] = {"bytes": sent.bytes}
            events.append(_event(f"to rank {sent.peer}", "link", trace.rank, 1, sent.begin, sent.end, size))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def from_core(
    rank: int,
    spans: Sequence[tuple[str, bool, int, int, int, int, int, int]],
    transfers: Sequence[tuple[int, int, int, int]],
) -> Trace:
    """From what ``_C`` records, in nanoseconds."""
    return Trace(
        rank,
        [
            Span(name, is_wait, step, slot, _PHASES[phase], peer, begin * 1e-9, end * 1e-9)
            for name, is_wait, step, slot, phase, peer, begin, end in spans
        ],
        [LinkTransfer(peer, size, begin * 1e-9, end * 1e-9) for peer, size, begin, end in transfers],
    )


def _event(
    name: str, category: str, rank: int, thread: int, begin: float, end: float, arguments: dict[str, int | str]
) -> dict[str, Any]:
    microseconds = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        **microseconds,
        "args": arguments,
    }


def _label(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
