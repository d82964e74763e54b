"""Times of calls that are taken in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

Work = Callable[[], object]


def in_turn(*works: Work) -> Work:
    """One function that calls all of them, one after another."""

    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


def seconds(work: Work) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternate(works: Sequence[Work], rounds: int, timer: Callable[[Work], float] = seconds) -> list[list[float]]:
    """Seconds of each of `works` in each round. They are called in turns, in reverse order in every other round.

    A first round is not counted.
    """
    times: list[list[float]] = [[] for _ in works]
    for round_number in range(rounds + 1):
        order = range(len(works)) if round_number % 2 else reversed(range(len(works)))
        for i in order:
            taken = timer(works[i])
            if round_number > 0:
                times[i].append(taken)
    return times


def median_ratio(times: Sequence[float], peers: Sequence[float]) -> float:
    """Median over the rounds of a time over the peer's time in the same round."""
    return statistics.median(a / b for a, b in zip(times, peers, strict=True))


def spread(times: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for fewer than two times."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle
