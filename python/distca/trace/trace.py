"""Traces of ranks: the parts of their steps, what they waited for, and which rows travelled meanwhile."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from distca.errors import InvalidArgumentError

#: The parts of a step of attention, in order.
PARTS = ("dispatch", "attend", "collect")
_PHASES = ("forward", "backward")
_FORMAT = "distca"  # the key in `otherData` of a file; its value is the version
_VERSION = 2
_READ = (1, 2)  # version 1 has no phases of training steps, no layers and no halves


@dataclass(frozen=True)
class Link:
    """An emulated network link, for tests and benchmarks. `distca.init` and `distca.testing.loopback` take one.

    Rows leave a rank one after another at the link's speed and arrive a latency later, while the rank computes. A
    signal arrives a latency after it was sent, but not before rows that were sent to that rank earlier.

    Attributes:
        bytes_per_second: bandwidth of everything that leaves a rank.
        latency: seconds.
        signal_only: every message takes the link's time of one byte. Its rows arrive all the same.
    """

    bytes_per_second: float
    latency: float = 0.0
    signal_only: bool = False

    @property
    def words(self) -> tuple[float, float, bool]:
        """The link as ``_C`` takes it."""
        return (float(self.bytes_per_second), float(self.latency), self.signal_only)


class Span(NamedTuple):
    """What a rank's thread did in seconds [begin, end) of the monotonic clock, which the processes of a host share."""

    #: ``dispatch``, ``attend`` or ``collect``; ``compute`` for what lies between them (`Trace.of_step`); for a wait,
    #: what was waited for.
    name: str
    is_wait: bool
    step: int
    slot: int
    phase: str
    #: The rank that was waited for; -1 if there is none.
    peer: int
    begin: float
    end: float
    #: The layer that called, as `core_attention` was told; None if it was not told.
    layer: int | str | None = None
    #: The half of ping-pong, 0 or 1; None without ping-pong.
    half: int | None = None

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.begin


class SentRows(NamedTuple):
    """Rows under way to a peer in seconds [begin, end), which count as in `Span`."""

    peer: int
    bytes: int
    begin: float
    end: float


class TrainingPhase(NamedTuple):
    """A phase of a step of training on one rank. Its seconds [begin, end) count as in `Span`."""

    #: ``forward``, ``backward`` or ``optimizer``.
    name: str
    begin: float
    end: float


class TrainingStep(NamedTuple):
    """A step of training on one rank. Its seconds [begin, end) count as in `Span`."""

    number: int
    begin: float
    end: float
    #: The load that the plans give this rank in it, in units of the cost model (`PlanStats.load`); None if not told.
    load: int | None = None


@dataclass(frozen=True)
class Trace:
    """What one rank did between two calls of `Context.take_trace`.

    Attributes:
        rank: the rank.
        spans: the parts of steps of attention, and the waits in them.
        transfers: rows on the emulated link, while the rank did something else.
        copies: rows that the rank itself copied to peers, in one of the parts. Rows that a thread, a network or an
            exchange carries are not recorded one by one.
        steps: the steps of training that the trace covers, as `of_step` was told.
        phases: the phases of these steps, in order.
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
        """This trace as the trace of a step of training. What lies between the parts becomes spans ``compute``.

        Args:
            number: the step's number.
            begin, end: seconds of `time.monotonic` between which the trace was taken.
            load: attention that the plans give this rank in it, which reports compare with the measured time.
            phases: the phases of the step, in order, none inside another. A ``compute`` span is cut at their borders
                and gets their names as its phase (``other`` outside of them). Without phases it gets the phase of the
                next part.

        Returns:
            A new trace.
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
        """When each span, transfer, copy, step of training and phase of one began, in seconds."""
        for spans in (self.spans, self.transfers, self.copies, self.steps, self.phases):
            yield from (span.begin for span in spans)

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for others or for its own rows to arrive."""
        return sum(span.seconds for span in self.spans if span.is_wait)

    @property
    def attending(self) -> float:
        """Seconds of computing attention, and of sending its results if no link or thread does that."""
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
        """Seconds in which rows left over the emulated link; 0 without a link."""
        return sum(transfer.end - transfer.begin for transfer in self.transfers)

    @property
    def hidden(self) -> float:
        """The share of `traffic` that did not make this rank wait: 1 - exposed / traffic; 1 if nothing travelled.

        The figure is strict: all waits of the rank count against it. It is negative if the rank waited longer for other
        reasons.
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
    """[begin, end) cut at the borders of phases: (name of the phase or ``other``, begin, end)."""
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
    """Writes ranks' traces as one JSON file in Chrome's trace format, which Perfetto and ``chrome://tracing`` open.

    In the file a rank is a process. Its first thread has the steps of training; inside them their phases; inside those
    the parts of steps of attention, with layer and half; inside those the waits. Its second thread has the rows that it
    sends. A rank may have several traces, one after another. `read_trace` and ``distca report`` read the file.

    Args:
        path: the file to write.
        traces: the traces of the ranks, in any order.
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
    """Reads the traces of a file that `write_trace` made, one for each rank. Seconds count from the first event.

    Raises:
        InvalidArgumentError: there is no such file, or it is of another kind or version.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}; a trace of distca.write_trace is expected") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not JSON; a trace of distca.write_trace is expected") from error
    found = content.get("otherData") if isinstance(content, dict) else None
    version = found.get(_FORMAT) if isinstance(found, dict) else None
    if version not in _READ:
        raise InvalidArgumentError(
            f"{path} is not a trace of distca.write_trace"
            + (
                ""
                if version is None
                else f" of this version (it has format {version}, this reads {' and '.join(map(str, _READ))})"
            )
        )
    traces: dict[int, Trace] = {}
    try:
        for event in content["traceEvents"]:
            rank = _integer(event["pid"])
            trace = traces.setdefault(rank, Trace(rank, [], []))
            if event["ph"] == "X":
                _add_event(trace, event)
        return [traces[rank] for rank in sorted(traces)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"{path}: an event is not as distca.write_trace makes it ({error!r})") from error


def _integer(value: Any) -> int:
    """The value, if it is an integer of 64 bits."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError(f"{value!r:.40} is not an integer of 64 bits")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value


def _seconds(microseconds: Any) -> float:
    seconds = float(microseconds * 1e-6)
    if not abs(seconds) < 2**63 * 1e-9:  # of a clock that counts nanoseconds; NaN fails, too
        raise ValueError(f"{microseconds!r:.40} is no time in microseconds")
    return seconds


def _add_event(trace: Trace, event: dict[str, Any]) -> None:
    begin, about, category = _seconds(event["ts"]), event["args"], event["cat"]
    end = begin + _seconds(event["dur"])
    if category == "training":
        load = about.get("load")
        trace.steps.append(TrainingStep(_integer(about["step"]), begin, end, load if load is None else _integer(load)))
    elif category == "phase":
        trace.phases.append(TrainingPhase(_word(event["name"]), begin, end))
    elif category in ("link", "copy"):
        rows = trace.transfers if category == "link" else trace.copies
        rows.append(SentRows(_integer(about["peer"]), _integer(about["bytes"]), begin, end))
    else:
        is_wait, phase = category == "wait", _word(about["phase"])
        name = event["name"].removeprefix("wait for ") if is_wait else event["name"].removesuffix(f" {phase}")
        step, slot, peer = (_integer(about[key]) for key in ("step", "slot", "peer"))
        trace.spans.append(
            Span(name, is_wait, step, slot, phase, peer, begin, end, about.get("layer"), about.get("half"))
        )


def from_core(
    rank: int,
    spans: Sequence[tuple[str, bool, int, int, int, int, int, int]],
    transfers: Sequence[tuple[int, int, int, int]],
    copies: Sequence[tuple[int, int, int, int]],
    callers: Mapping[int, tuple[int | str | None, int | None]],
) -> Trace:
    """A trace from what ``_C`` records, in nanoseconds. `callers`: layer and half of steps of attention, if known."""
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
        """Labels, then spans by begin. Of spans that begin together, the one that holds the others comes first."""
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
    """Microseconds, rounded up a little. Cut to nanoseconds they are the same; touching spans then do not overlap."""
    return round(nanoseconds / 1e3 + 1e-4, 4)
