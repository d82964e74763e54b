"""Figures of traced steps of training: how long ranks idled, what traffic was hidden, how even attention was."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distca.errors import InvalidArgumentError
from distca.trace.trace import SentRows, Span, Trace, TrainingStep

TRACE, PICTURE = "trace.json", "timeline.png"
"""The names of a traced run's files."""

Intervals = list[tuple[float, float]]
"""Intervals [begin, end) in seconds, ascending, which neither touch nor overlap."""


@dataclass(frozen=True)
class Window:
    """One step of training on all ranks, from when the first rank began it to when the last one ended it.

    Attributes:
        number: the step's number; None if the trace has no training steps and is one window.
        begin, end: seconds, as in the trace.
        steps: this step on each rank.
    """

    number: int | None
    begin: float
    end: float
    steps: list[TrainingStep]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.begin


@dataclass(frozen=True)
class RankFigures:
    """One rank's figures over some steps, added up, in seconds.

    Attributes:
        rank: the rank.
        seconds: length of the steps.
        idle: time in which it waited in a step of attention, had not begun a step of training, or had ended it.
        attention: time in which it attended.
        traffic: time in which rows to or from it were under way.
        exposed: the part of `traffic` in which it did not compute: it waited, or sent or took in rows.
        load: attention that the plans give it, in units of the cost model; None if the trace does not say.
    """

    rank: int
    seconds: float
    idle: float
    attention: float
    traffic: float
    exposed: float
    load: int | None

    @property
    def idle_share(self) -> float:
        """Idle time as a share of the time of the steps."""
        return self.idle / self.seconds if self.seconds > 0 else 0.0

    @property
    def hidden(self) -> float:
        """The part of `traffic` in which it computed: attention, or what lies between steps of attention."""
        return self.traffic - self.exposed


@dataclass(frozen=True)
class Figures:
    """The figures of all ranks over some steps.

    Attributes:
        numbers: the steps' numbers; empty if the trace has no training steps.
        ranks: the figures of each rank.
        predicted: largest over mean of the planned loads, averaged over steps; None if the trace does not say.
        measured: largest over mean of the seconds of attending, averaged over steps.
    """

    numbers: list[int]
    ranks: list[RankFigures]
    predicted: float | None
    measured: float

    def as_json(self) -> dict[str, Any]:
        """Shares, seconds and loads by rank, for a run's summary."""
        return {
            "steps": self.numbers,
            "idle": [rank.idle_share for rank in self.ranks],
            "traffic_seconds": [rank.traffic for rank in self.ranks],
            "exposed_seconds": [rank.exposed for rank in self.ranks],
            "attention_seconds": [rank.attention for rank in self.ranks],
            "imbalance_predicted": self.predicted,
            "imbalance_measured": self.measured,
        }

    @property
    def idle_shares(self) -> tuple[float, float]:
        """The idle shares of the rank that idles least, which is the slowest, and of the rank that idles most."""
        shares = [rank.idle_share for rank in self.ranks]
        return min(shares), max(shares)


def windows(traces: Sequence[Trace]) -> list[Window]:
    """The steps of training that all traces have, in order. If the traces have no steps, one window of everything."""
    if not any(trace.steps for trace in traces):
        begins = [begin for trace in traces for begin in trace.begins()]
        if not begins:
            raise InvalidArgumentError("the trace has no events: nothing ran between start_trace and take_trace")
        begin, end = min(begins), max(span.end for trace in traces for span in trace.spans)
        return [Window(None, begin, end, [TrainingStep(-1, begin, end) for _ in traces])]
    by_rank = [{step.number: step for step in trace.steps} for trace in traces]
    found = []
    for number in sorted(set.intersection(*(set(steps) for steps in by_rank))):
        steps = [of_rank[number] for of_rank in by_rank]
        found.append(Window(number, min(s.begin for s in steps), max(s.end for s in steps), steps))
    if not found:
        raise InvalidArgumentError("the ranks of the trace have no step of training in common")
    return found


def after_warm_up(of: Sequence[Window]) -> list[Window]:
    """All windows but the first, which has one-time costs; the first too if it is the only one."""
    return list(of[1:] or of)


def figures(traces: Sequence[Trace], of: Sequence[Window]) -> Figures:
    """The figures of the ranks in these windows. There is one trace for each rank, and at least one window."""
    arriving = {trace.rank: [s for other in traces for s in _sent(other) if s.peer == trace.rank] for trace in traces}
    per_window = [
        [
            _figures_of_step(trace, arriving[trace.rank], window, step)
            for trace, step in zip(traces, window.steps, strict=True)
        ]
        for window in of
    ]
    predicted = None
    loads = [[rank.load for rank in ranks if rank.load is not None] for ranks in per_window]
    if all(len(of_window) == len(traces) for of_window in loads):
        predicted = statistics.mean(imbalance(of_window) for of_window in loads)
    return Figures(
        [window.number for window in of if window.number is not None],
        [_added_up([ranks[index] for ranks in per_window]) for index in range(len(traces))],
        predicted,
        statistics.mean(imbalance([rank.attention for rank in ranks]) for ranks in per_window),
    )


def imbalance(values: Sequence[float]) -> float:
    """The largest value over the mean; 1 if all are 0."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def rows_of_table(found: Figures) -> list[tuple[str, ...]]:
    """The figures of each rank as text, after a row of headings."""
    loads, attention = (
        [rank.load for rank in found.ranks if rank.load is not None],
        [rank.attention for rank in found.ranks],
    )
    planned = _relative(loads) if len(loads) == len(found.ranks) else ["-"] * len(found.ranks)
    rows: list[tuple[str, ...]] = [
        ("rank", "idle", "traffic hidden", "traffic exposed", "load planned", "attention measured")
    ]
    for rank, load, measured in zip(found.ranks, planned, _relative(attention), strict=True):
        hidden, exposed = (
            f"{part * 1e3:,.1f} ms ({part / rank.traffic:.0%})" if rank.traffic > 0 else "-"
            for part in (rank.hidden, rank.exposed)
        )
        rows.append((str(rank.rank), f"{rank.idle_share:.2%}", hidden, exposed, load, measured))
    return rows


def lines_below_table(found: Figures) -> list[str]:
    """Sentences about all ranks together."""
    least, most = found.idle_shares
    planned = "" if found.predicted is None else f"{found.predicted:.3f} as planned, "
    lines = [
        f"idle share of a step: {least:.2%} on the slowest rank, {most:.2%} on the one that idles most",
        f"largest attention load over the mean: {planned}{found.measured:.3f} as measured",
    ]
    if not any(rank.traffic for rank in found.ranks):
        lines.append("no rows in transit were recorded: none moved, or a thread or an exchange carried them")
    return lines


def _relative(values: Sequence[float]) -> list[str]:
    mean = sum(values) / len(values)
    return [f"{value / mean if mean else 0.0:.3f}" for value in values]


def cover(spans: Iterable[Span | SentRows], begin: float, end: float) -> Intervals:
    """The parts of [begin, end) that are in any of the spans."""
    found: Intervals = []
    for first, last in sorted((max(span.begin, begin), min(span.end, end)) for span in spans):
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def seconds_in_both(first: Intervals, second: Intervals) -> float:
    """Seconds that are in both sets of intervals."""
    seconds, a, b = 0.0, 0, 0
    while a < len(first) and b < len(second):
        seconds += max(0.0, min(first[a][1], second[b][1]) - max(first[a][0], second[b][0]))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return seconds


def _seconds(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def _sent(trace: Trace) -> list[SentRows]:
    return [*trace.transfers, *trace.copies]


def _figures_of_step(trace: Trace, arriving: Sequence[SentRows], window: Window, step: TrainingStep) -> RankFigures:
    here = (step.begin, step.end)
    waits = cover((span for span in trace.spans if span.is_wait), *here)
    attend = cover((span for span in trace.spans if span.name == "attend" and not span.is_wait), *here)
    moving = (span for span in trace.spans if span.is_wait or span.name in ("dispatch", "collect"))
    not_computing = cover((*moving, *trace.copies), *here)
    traffic = cover((*_sent(trace), *arriving), *here)
    return RankFigures(
        rank=trace.rank,
        seconds=window.seconds,
        idle=_seconds(waits) + window.seconds - (step.end - step.begin),
        attention=_seconds(attend) - seconds_in_both(attend, waits),
        traffic=_seconds(traffic),
        exposed=seconds_in_both(traffic, not_computing),
        load=step.load,
    )


def _added_up(steps: Sequence[RankFigures]) -> RankFigures:
    loads = [step.load for step in steps if step.load is not None]
    return RankFigures(
        rank=steps[0].rank,
        seconds=sum(step.seconds for step in steps),
        idle=sum(step.idle for step in steps),
        attention=sum(step.attention for step in steps),
        traffic=sum(step.traffic for step in steps),
        exposed=sum(step.exposed for step in steps),
        load=sum(loads) if len(loads) == len(steps) else None,
    )
