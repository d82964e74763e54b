"""What traffic costs a step: the difference of paired steps, with and without rows on the link, and its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distca.trace.causes import Causes, wait_causes
from distca.trace.trace import SentRows, Trace

#: A step on all ranks: the trace of each, with the phases forward and backward.
Step = Sequence[Trace]
PHASES = ("forward", "backward")
#: The kinds of steps that a round has: rows on the link, one byte a message, no link.
KINDS = ("link", "one_byte", "without")
_LEVEL = 0.95


class Estimate(NamedTuple):
    """A median over rounds, and an interval that holds the true median with a probability of at least `level`."""

    median: float
    low: float
    high: float
    level: float

    def scaled(self, factor: float, offset: float = 0.0) -> Estimate:
        """The estimate of ``factor * value + offset``."""
        low, high = sorted((factor * self.low + offset, factor * self.high + offset))
        return Estimate(factor * self.median + offset, low, high, self.level)

    def __str__(self) -> str:
        """The median and the interval."""
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of independent values, with the interval of the sign test.

    The interval lies between the k-th smallest and the k-th largest value. It misses the true median with the
    probability that fewer than k of n tossed coins show heads, or fewer than k tails, whatever the distribution is. k
    is the largest number with which it holds the median with 95 %. Fewer than six values cannot reach that; the
    interval is then from the smallest to the largest.
    """
    n, in_order = len(values), sorted(values)
    level, k = 1.0 - 2.0 ** (1 - n), 1
    missed = 2.0**-n  # the probability of fewer than k heads
    while 2 * k < n:
        missed += math.comb(n, k) * 2.0**-n
        if 1 - 2 * missed < _LEVEL:
            break
        level, k = 1 - 2 * missed, k + 1
    return Estimate(statistics.median(in_order), in_order[k - 1], in_order[n - k], level)


@dataclass(frozen=True)
class Paired:
    """The same steps in alternation, one of each kind in a round: rows on the link, one byte a message, no link.

    Attributes:
        link, one_byte, without: the steps of each kind, by round.
    """

    link: Sequence[Step]
    one_byte: Sequence[Step]
    without: Sequence[Step]

    def exposed(self, phase: str | None = None) -> list[float]:
        """For each round the seconds that a step takes longer because its rows have bytes. Noise makes some negative.

        Whatever else makes ranks wait is in both steps of a pair, and leaves the difference.
        """
        return _differences(self.link, self.one_byte, phase)

    def signals(self, phase: str | None = None) -> Estimate:
        """The seconds that messages of one byte cost: latencies, and the thread of the link."""
        return estimate(_differences(self.one_byte, self.without, phase))

    def traffic(self, phase: str | None = None) -> float:
        """Seconds in which the busiest rank's rows are on the link in a step."""
        return statistics.median(max(_on_link(trace, phase) for trace in step) for step in self.link)

    def attention(self, phase: str | None = None) -> float:
        """Seconds of attention in a step with one byte a message, of the rank that computes most."""
        return statistics.median(max(_attending(trace, phase) for trace in step) for step in self.one_byte)

    def hidden(self, phase: str | None = None) -> Estimate:
        """The share of the traffic that costs no time: one minus the exposed seconds over those of the traffic."""
        traffic = self.traffic(phase)
        return estimate(self.exposed(phase)).scaled(-1 / traffic, 1.0)

    def waits(self, kind: str, phase: str | None = None) -> Causes:
        """Medians over rounds of what a rank waits in a step of a kind (``"link"``, ...), mean of the ranks."""
        rounds = [wait_causes(step, phase) for step in getattr(self, kind)]
        return Causes(*(statistics.median(map(statistics.mean, each)) for each in _by_cause(rounds)))

    def seconds(self, kind: str, phase: str | None = None) -> float:
        """Median seconds of a step of a kind."""
        return statistics.median(seconds_of(step, phase) for step in getattr(self, kind))


def seconds_of(step: Step, phase: str | None = None) -> float:
    """Seconds from when the first rank began a phase of a step to when the last one ended it; None: all phases."""
    if phase is None:
        return sum(seconds_of(step, one) for one in PHASES)
    spans = [one for trace in step for one in trace.phases if one.name == phase]
    return max(span.end for span in spans) - min(span.begin for span in spans)


def _differences(ones: Sequence[Step], others: Sequence[Step], phase: str | None) -> list[float]:
    return [seconds_of(one, phase) - seconds_of(other, phase) for one, other in zip(ones, others, strict=True)]


def _by_cause(rounds: Sequence[Sequence[Causes]]) -> list[list[list[float]]]:
    """For each cause, for each round, the seconds of the ranks."""
    return [[[getattr(rank, cause) for rank in ranks] for ranks in rounds] for cause in Causes._fields]


def _attending(trace: Trace, phase: str | None) -> float:
    spans = [span for span in trace.spans if phase in (None, span.phase)]
    return Trace(trace.rank, spans, []).attending


def _on_link(trace: Trace, phase: str | None) -> float:
    return sum(sent.end - sent.begin for sent in trace.transfers if phase is None or _within(sent, trace, phase))


def _within(sent: SentRows, trace: Trace, phase: str) -> bool:
    return any(one.name == phase and one.begin <= sent.begin < one.end for one in trace.phases)
