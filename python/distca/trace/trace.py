"""What ranks did when: the parts of their steps, what they waited for, and what travelled meanwhile."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from distca.errors import InvalidArgumentError

#: The parts of a step of attention, in their order.
PARTS = ("dispatch", "attend", "collect")
_PHASES = ("forward", "backward")
_FORMAT = "distca"  # what `otherData` of a file names, and its version
_VERSION = 2
_READ = (1, 2)  # version 1 has no phases of training steps, layers and halves


@dataclass(frozen=True)
class Link:
    """An emulated network link, for tests and benchmarks; `distca.init` and `distca.testing.loopback` take one.

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

    #: ``dispatch``, ``attend`` or ``collect``, and ``compute`` for what lies between (`Trace.of_step`); of a wait,
    #: what was waited for in one of them.
    name: str
    is_wait: bool
    step: int
    slot: int
    phase: str
    #: Who was waited for; -1 where it is nobody.
    peer: int
    begin: float
    end: float
    #: The layer that called, as it was told to `core_attention`; None where nobody said.
    layer: int | str | None = None
    #: Of ping-pong, 0 or 1; None otherwise.
    half: int | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class SentRows(NamedTuple):
    """Rows on their way to a peer, seconds [begin, end) as in `Span`."""

    peer: int
    bytes: int
    begin: float
    end: float


class TrainingPhase(NamedTuple):
    """A part of a step of training on one rank, seconds [begin, end) as in `Span`."""

    #: ``forward``, ``backward`` or ``optimizer``.
    name: str
    begin: float
    end: float


class TrainingStep(NamedTuple):
    """A step of training on one rank, seconds [begin, end) as in `Span`."""

    number: int
    begin: float
    end: float
    #: Attention that the plans give this rank in it, in units of the cost model (`PlanStats.load`); None if not said.
    load: int | None = None


@dataclass(frozen=True)
class Trace:
    """What one rank did between two calls of `Context.take_trace`.

    Attributes:
        rank: which.
        spans: the parts of steps of attention, and the waits in them.
        transfers: rows on the emulated link, while the rank did something else.
        copies: rows that the rank copied to peers itself, in one of the parts. Rows that a thread, a network or an
            exchange of all ranks carries are not recorded one by one.
        steps: the steps of training that it covers, where somebody said so (`of_step`).
        phases: of these steps, in order.
    """

    rank: int
    spans: list[Span]
    transfers: list[SentRows]
    copies: list[SentRows] = field(default_factory=list)
    steps: list[TrainingStep] = field(default_factory=list)
    phases: list[TrainingPhase] = field(default_factory=list)

    def of_step(
        self,
        number: int,
        begin: float,
        end: float,
        load: int | None = None,
        phases: Sequence[TrainingPhase] = (),
    ) -> Trace:
        """This trace as that of a step of training, with what lies between the parts as spans ``compute``.

        Args:
            number: of the step.
            begin, end: seconds of `time.monotonic` between which it was taken.
            load: attention that the plans give this rank in it, for reports to compare with what it took.
            phases: of the step, in order, none inside another. A ``compute`` span is cut at their borders and has
                their names as its phase (``other`` outside of them); without phases, it has that of the next part.
        """
        parts = sorted((span for span in self.spans if not span.is_wait), key=lambda span: span.begin)
        before: list[Span | None] = [None, *parts]
        after: list[Span | None] = [*parts, None]
        gaps = [
            Span("compute", False, -1, -1, phase, -1, first, last, half=_half_between(phase, one, other))
            for one, other in zip(before, after, strict=True)
            for phase, first, last in _in_phases(
                begin if one is None else one.end,
                end if other is None else other.begin,
                phases or [TrainingPhase(getattr(other or one, "phase", "forward"), begin, end)],
            )
        ]
        spans = sorted([*self.spans, *gaps], key=lambda span: (span.begin, -span.end))
        step = TrainingStep(number, begin, end, load)
        return replace(self, spans=spans, steps=[*self.steps, step], phases=[*self.phases, *phases])

    def begins(self) -> Iterator[float]:
        """When each span, each sending of rows, each step of training and each phase of one began, in seconds."""
        for spans in (self.spans, self.transfers, self.copies, self.steps, self.phases):
            yield from (span.begin for span in spans)

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for others or for its own rows to arrive."""
        return sum(span.seconds for span in self.spans if span.is_wait)

    @property
    def attending(self) -> float:
        """Seconds of computing attention, and of sending its results where no link or thread does."""
        parts = sorted((s.begin, s.end) for s in self.spans if s.name == "attend" and not s.is_wait)
        begins = [begin for begin, _ in parts]
        seconds = sum(end - begin for begin, end in parts)
        for wait in (span for span in self.spans if span.is_wait):
            part = bisect_right(begins, wait.begin) - 1
            if part >= 0 and wait.end <= parts[part][1]:
                seconds -= wait.seconds
        return seconds

    @property
    def traffic(self) -> float:
        """Seconds in which rows left over the emulated link; 0 without one."""
        return sum(transfer.end - transfer.begin for transfer in self.transfers)

    @property
    def hidden(self) -> float:
        """Share of `traffic` that did not make this rank wait: 1 - exposed / traffic; 1 where nothing travelled.

        Strict, for all of its waits count against it: negative where it waited longer for other reasons.
        """
        return 1.0 - self.exposed / self.traffic if self.traffic > 0 else 1.0


def _half_between(phase: str, one: Span | None, other: Span | None) -> int | None:
    """The half of ping-pong that computes between two parts.

    The halves take turns after each part. In both phases, what a half computes outside of attention follows its collect
    and precedes its dispatch.
    """
    if phase not in _PHASES:
        return None
    if other is not None and (other.name == "dispatch" or one is None or one.name != "collect"):
        return other.half
    return None if one is None else one.half


def _in_phases(begin: float, end: float, phases: Iterable[TrainingPhase]) -> Iterator[tuple[str, float, float]]:
    """What is in [begin, end), cut at the borders of phases: (name of the phase or ``other``, begin, end)."""
    at = begin
    for phase in phases:
        for name, first, last in (("other", at, phase.begin), (phase.name, max(at, phase.begin), phase.end)):
            last = min(last, end)
            if first < last:
                yield name, first, last
                at = last
    if at < end:
        yield "other", at, end


def write_trace(path: str | Path, traces: Sequence[Trace]) -> None:
    """Writes ranks' traces as one JSON file of Chrome's trace format, which Perfetto and ``chrome://tracing`` open.

    A rank is a process there: its first thread has the steps of training, in them their phases, in those the parts of
    steps of attention with their layer and half, and in those the waits; its second one has the rows that it sends. A
    rank may have several traces, one after another.
    `read_trace` and ``distca report`` read the file.
    """
    events = _Events(min((begin for trace in traces for begin in trace.begins()), default=0.0))
    for rank in sorted({trace.rank for trace in traces}):
        events.label("process_name", rank, 0, f"rank {rank}")
        events.label("thread_name", rank, 0, "steps")
        events.label("thread_name", rank, 1, "rows sent")
    for trace in traces:
        for step in trace.steps:
            load = {} if step.load is None else {"load": step.load}
            events.add(f"training step {step.number}", "training", trace.rank, 0, step, {"step": step.number, **load})
        for phase in trace.phases:
            events.add(phase.name, "phase", trace.rank, 0, phase, {})
        for span in trace.spans:
            name = f"wait for {span.name}" if span.is_wait else f"{span.name} {span.phase}"
            about: dict[str, Any] = {"step": span.step, "slot": span.slot, "phase": span.phase, "peer": span.peer}
            about |= {name: value for name, value in (("layer", span.layer), ("half", span.half)) if value is not None}
            events.add(name, "wait" if span.is_wait else "step", trace.rank, 0, span, about)
        for category, rows in (("link", trace.transfers), ("copy", trace.copies)):
            for sent in rows:
                events.add(
                    f"to rank {sent.peer}", category, trace.rank, 1, sent, {"peer": sent.peer, "bytes": sent.bytes}
                )
    content = {"traceEvents": events.in_order(), "displayTimeUnit": "ms", "otherData": {_FORMAT: _VERSION}}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_trace(path: str | Path) -> list[Trace]:
    """The traces of a file of `write_trace`, one a rank, seconds from the first event on.

    Raises:
        InvalidArgumentError: where there is no such file, or one of another kind.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}; a trace of distca.write_trace is expected") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no JSON; a trace of distca.write_trace is expected") from error
    found = content.get("otherData") if isinstance(content, dict) else None
    version = found.get(_FORMAT) if isinstance(found, dict) else None
    if version not in _READ:
        raise InvalidArgumentError(
            f"{path} is no trace of distca.write_trace"
            + (
                ""
                if version is None
                else f" of this version (it has format {version}, this reads {' and '.join(map(str, _READ))})"
            )
        )
    traces: dict[int, Trace] = {}
    try:
        for event in content["traceEvents"]:
            trace = traces.setdefault(event["pid"], Trace(event["pid"], [], []))
            if event["ph"] == "X":
                _add_event(trace, event)
        return [traces[rank] for rank in sorted(traces)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"{path}: an event is not as distca.write_trace makes it ({error!r})") from error


def _add_event(trace: Trace, event: dict[str, Any]) -> None:
    begin, about, category = event["ts"] * 1e-6, event["args"], event["cat"]
    end = begin + event["dur"] * 1e-6
    if category == "training":
        trace.steps.append(TrainingStep(about["step"], begin, end, about.get("load")))
    elif category == "phase":
        trace.phases.append(TrainingPhase(event["name"], begin, end))
    elif category in ("link", "copy"):
        rows = trace.transfers if category == "link" else trace.copies
        rows.append(SentRows(about["peer"], about["bytes"], begin, end))
    else:
        is_wait, phase = category == "wait", about["phase"]
        name = event["name"].removeprefix("wait for ") if is_wait else event["name"].removesuffix(f" {phase}")
        called = about.get("layer"), about.get("half")
        trace.spans.append(Span(name, is_wait, about["step"], about["slot"], phase, about["peer"], begin, end, *called))


def from_core(
    rank: int,
    spans: Sequence[tuple[str, bool, int, int, int, int, int, int]],
    transfers: Sequence[tuple[int, int, int, int]],
    copies: Sequence[tuple[int, int, int, int]],
    callers: Mapping[int, tuple[int | str | None, int | None]],
) -> Trace:
    """From what ``_C`` records, in nanoseconds. `callers`: layer and half of steps of attention, as far as known."""
    unknown = None, None
    return Trace(
        rank,
        [
            Span(
                *(name, is_wait, step, slot, _PHASES[phase], peer, begin * 1e-9, end * 1e-9),
                *callers.get(step, unknown),
            )
            for name, is_wait, step, slot, phase, peer, begin, end in spans
        ],
        _sent(transfers),
        _sent(copies),
    )


def _sent(rows: Iterable[tuple[int, int, int, int]]) -> list[SentRows]:
    return [SentRows(peer, size, begin * 1e-9, end * 1e-9) for peer, size, begin, end in rows]


class _Events:
    """Events of Chrome's format. Times count from the first one: microseconds since the machine's start lose digits."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._labels: list[dict[str, Any]] = []
        self._spans: list[dict[str, Any]] = []

    def in_order(self) -> list[dict[str, Any]]:
        """Of spans that begin together, the one that holds the others comes first."""
        return [*self._labels, *sorted(self._spans, key=lambda event: (event["ts"], -event["dur"]))]

    def add(
        self,
        name: str,
        category: str,
        rank: int,
        thread: int,
        span: Span | SentRows | TrainingStep | TrainingPhase,
        about: dict[str, Any],
    ) -> None:
        begin, end = (round((at - self._origin) * 1e9) for at in (span.begin, span.end))
        self._spans.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "ts": _microseconds(begin),
                "dur": _microseconds(end - begin),
                "args": about,
            }
        )

    def label(self, kind: str, rank: int, thread: int, name: str) -> None:
        self._labels.append({"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})


def _microseconds(nanoseconds: int) -> float:
    """A little more, so that a reader who cuts it down to nanoseconds finds these: spans that touch never overlap."""
    return round(nanoseconds / 1e3 + 1e-4, 4)
