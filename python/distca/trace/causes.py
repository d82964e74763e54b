"""Why ranks waited in steps of attention: a peer had not come to what it sends, or its rows were still on their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distca.errors import InvalidArgumentError
from distca.trace.trace import Span, Trace

#: The part of a step in which a peer sends what a rank waits for.
_SENT_IN = {"rows for tasks served here": "dispatch", "rows that come home": "attend"}
_OWN_ROWS = "its own rows to arrive"
_EXCHANGE = "all ranks to exchange rows"


class Causes(NamedTuple):
    """Seconds that a rank waited, by cause."""

    #: A peer had not yet sent the rows, given credit, or come to the exchange.
    peer: float
    #: The rows had been sent and had not arrived.
    rows: float


def wait_causes(traces: Sequence[Trace], phase: str | None = None) -> list[Causes]:
    """The seconds that each rank waited, by cause.

    A wait for rows of a peer is the peer's until the part of the step ends in which the peer sends them: dispatch for
    rows of tasks, attend for results. From then on it is that of the rows. A peer may itself be late because it waited
    for rows. In a step whose results come home in several rounds, those of later rounds are sent in collect; a wait for
    them counts for the rows once the peer has begun to collect.

    Args:
        traces: the traces of all ranks over the same steps of one context.
        phase: ``"forward"`` or ``"backward"``; None: both.

    Returns:
        For each trace the causes of its rank's waits.

    Raises:
        InvalidArgumentError: a rank waited for a peer whose trace is not among them.
    """
    ends: dict[tuple[int, int, str], float] = {}
    begins: dict[tuple[int, int, str], float] = {}
    exchanges: dict[tuple[int, int], float] = {}
    for trace in traces:
        for span in trace.spans:
            if not span.is_wait:
                ends[trace.rank, span.step, span.name] = span.end
                begins[trace.rank, span.step, span.name] = span.begin
        for number, span in _exchanges(trace):
            exchanges[span.step, number] = max(span.begin, exchanges.get((span.step, number), span.begin))

    def sent(wait: Span, seen: set[tuple[str, int, int]]) -> float:
        """When the peer had sent what is waited for."""
        key = (wait.name, wait.step, wait.peer)
        of, part = (begins, "collect") if key in seen else (ends, _SENT_IN[wait.name])
        seen.add(key)
        try:
            return of[wait.peer, wait.step, part]
        except KeyError:
            raise InvalidArgumentError(
                f"trace: rank {wait.peer}, which another rank waited for in step {wait.step}, has no {part} of that "
                "step; pass the traces of all ranks over the same steps"
            ) from None

    found = []
    for trace in traces:
        peer = rows = 0.0
        seen: set[tuple[str, int, int]] = set()
        came = {id(span): exchanges[span.step, number] for number, span in _exchanges(trace)}
        for span in sorted((span for span in trace.spans if span.is_wait), key=lambda span: span.begin):
            if phase not in (None, span.phase):
                continue
            if span.name == _OWN_ROWS:
                there = span.begin
            elif span.name == _EXCHANGE:
                there = came[id(span)]
            else:
                there = sent(span, seen) if span.name in _SENT_IN else span.end
            there = min(max(there, span.begin), span.end)
            peer += there - span.begin
            rows += span.end - there
        found.append(Causes(peer, rows))
    return found


def _exchanges(trace: Trace) -> Iterable[tuple[int, Span]]:
    """The waits of a trace for exchanges, each with its number among those of its step."""
    numbers: dict[int, int] = {}
    for span in trace.spans:
        if span.is_wait and span.name == _EXCHANGE:
            numbers[span.step] = numbers.get(span.step, -1) + 1
            yield numbers[span.step], span
