"""What the order of calls allows: the calls of a phase played again with the times of their computation, in theory.

A rank computes, waits and sends as the dispatcher does. Nothing takes time but computation, as it was measured, and
rows on the link. Therefore no run with the same calls and times exposes less, but for noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import distca
from distca.apps.bench.overlap.paired import Step
from distca.trace.trace import Span, Trace

#: Bytes from rank to rank, by half and by ``in`` (to the servers) or ``out`` (back home).
Messages = Mapping[tuple[int, str], Sequence[Sequence[int]]]


class CallTimes(NamedTuple):
    """Seconds of one rank's computation around a call, without its waits."""

    #: From the end of the call before.
    before: float
    #: In the call, before it waits.
    first: float
    #: In the call, from when it needs to wait no longer.
    then: float


class Pass(NamedTuple):
    """A forward or backward: its calls, and for each rank the computation around each and after the last."""

    calls: list[tuple[str, int]]
    times: list[list[CallTimes]]
    after: list[float]


def pass_of(steps: Sequence[Step], phase: str) -> Pass:
    """The calls of a phase with their times: medians over steps in which no rows were on the link."""
    of_ranks = [[_times(trace, phase) for trace in ranks] for ranks in zip(*steps, strict=True)]
    (calls,) = {tuple(calls) for rank in of_ranks for calls, _, _ in rank}
    times = [
        [CallTimes(*map(statistics.median, zip(*of_call, strict=True))) for of_call in zip(*rounds, strict=True)]
        for rounds in ([times for _, times, _ in rank] for rank in of_ranks)
    ]
    return Pass(list(calls), times, [statistics.median(after for _, _, after in rank) for rank in of_ranks])


def messages_of(plans: Sequence[distca.Plan], phase: str) -> dict[tuple[int, str], list[list[int]]]:
    """The messages of a phase, of the plan of each half."""
    found = {}
    for (half, plan), direction in itertools.product(enumerate(plans), ("in", "out")):
        ranks = plan.layout.num_ranks
        matrix = [[0] * ranks for _ in range(ranks)]
        for transfer in plan.transfers:
            if transfer.message == f"{phase}_{direction}":
                matrix[transfer.source][transfer.target] += transfer.bytes
        found[half, direction] = matrix
    return found


def play(of: Pass, messages: Messages, link: distca.Link) -> float:
    """Seconds of a pass whose ranks begin together: from then on until the last rank has ended.

    Args:
        of: the pass.
        messages: its messages.
        link: every rank's link.

    A rank that collects waits for the rows that it sent of its tensors. Its results may still leave: its slot is free
    when they have, and it begins the half's next step then. Every call needs only what came in calls before it, or
    credit that its receiver gives as it comes to the same call. Therefore one walk over the calls is enough.
    """
    ranks = len(of.times)
    now, free = [0.0] * ranks, [0.0] * ranks
    freed: dict[tuple[int, int], float] = {}
    there: dict[tuple[int, str, int], float] = {}
    gone: dict[tuple[int, str, int], float] = {}

    def send(rank: int, half: int, direction: str, credits: Sequence[float]) -> None:
        """Sends to the next rank first, and goes round. Each message waits for the credit of its receiver."""
        for peer in ((rank + shift) % ranks for shift in range(1, ranks)):
            num_bytes = messages[half, direction][rank][peer]
            if num_bytes == 0:
                continue
            now[rank] = max(now[rank], credits[peer])
            taken = (1 if link.signal_only else num_bytes) / link.bytes_per_second
            free[rank] = max(now[rank], free[rank]) + taken
            for ends, end in ((there, peer), (gone, rank)):
                key = half, direction, end
                ends[key] = max(ends.get(key, 0.0), free[rank] + link.latency)

    for number, (part, half) in enumerate(of.calls):
        for rank in range(ranks):
            times = of.times[rank][number]
            now[rank] += times.before + times.first
        if part == "dispatch":
            now = [max(at, gone.get((half, "out", rank), 0.0)) for rank, at in enumerate(now)]
            credits = [freed.get((half, rank), 0.0) for rank in range(ranks)]
            for rank in range(ranks):
                send(rank, half, "in", credits)
        for rank in range(ranks):
            then = of.times[rank][number].then
            if part == "attend":
                now[rank] = max(now[rank], there.get((half, "in", rank), 0.0)) + then
                send(rank, half, "out", [0.0] * ranks)
            if part == "collect":
                now[rank] = max(now[rank], there.get((half, "out", rank), 0.0)) + then
                now[rank] = max(now[rank], gone.get((half, "in", rank), 0.0))
                freed[half, rank] = max(now[rank] + link.latency, gone.get((half, "out", rank), 0.0))
    return max(at + after for at, after in zip(now, of.after, strict=True))


def _times(trace: Trace, phase: str) -> tuple[list[tuple[str, int]], list[CallTimes], float]:
    """The calls of a phase of one step of one rank, their times, and the seconds after the last."""
    (window,) = (one for one in trace.phases if one.name == phase)
    inside = [span for span in trace.spans if window.begin <= span.begin < window.end and span.name != "compute"]
    parts = sorted((span for span in inside if not span.is_wait), key=lambda span: span.begin)
    calls, times, at = [], [], window.begin
    for part in parts:
        waits = [span for span in inside if span.is_wait and part.begin <= span.begin <= part.end]
        calls.append((part.name, part.half or 0))
        times.append(CallTimes(part.begin - at, *_around(part, waits)))
        at = part.end
    return calls, times, window.end - at


def _around(part: Span, waits: Sequence[Span]) -> tuple[float, float]:
    """Seconds of a call before its first wait, and from there without its waits. A dispatch needs all its time first.

    An attend that waits for nobody sends at its end.
    """
    computed = part.seconds - sum(wait.seconds for wait in waits)
    if part.name == "dispatch":
        return computed, 0.0
    first = min((wait.begin for wait in waits), default=part.begin) - part.begin
    return first, computed - first
