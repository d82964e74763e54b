"""Whether distca pays: its best set-up against the best of the others, as far as the errors of the model tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from distca.simulator.search import Found
from distca.simulator.setup import Parallelism
from distca.simulator.validation import Errors, Interval

#: The strategies that are distca's own.
OURS = (
    "distca-rows",
    "distca-retained",
    "distca-single",
    "distca-spread",
    "distca-head-tail",
    "distca-tuned",
    "distca",
)
#: A share of attention below which balance cannot be seen, and how far equal attention may differ.
LITTLE = 0.05


@dataclasses.dataclass(frozen=True)
class Best:
    """What a verdict takes of a strategy's best set-up.

    Attributes:
        strategy: the strategy's name.
        parallelism: the set-up.
        tokens_per_second, attention: of its `StrategyResult`.
    """

    strategy: str
    parallelism: Parallelism | None
    tokens_per_second: float
    attention: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How much faster distca is than the best other strategy.

    Attributes:
        ours, other: the best strategy of either side.
        speedup: tokens a second of ours over the other's.
        interval: where the speed-up lies if the model errs no more than it did against what ran.
        reason: why there is little to gain, if that is known.
    """

    ours: str
    other: str
    speedup: float
    interval: Interval
    reason: str | None

    @property
    def pays(self) -> bool:
        """Whether distca is faster beyond the errors of the model, and no reason says that balance is not why."""
        return self.interval.least > 1 and self.reason is None

    def __str__(self) -> str:
        figure = f"{self.ours} / {self.other}: {self.speedup:.3f} times the tokens a second ({self.interval})"
        if self.pays:
            return f"{figure}, modelled"
        reason = self.reason or "the errors of the model allow no difference"
        if self.interval.most < 1:
            reason = f"{self.other} is faster"
        return f"nothing to gain: {reason}; {figure}, modelled"


def verdict_of(found: Sequence[Found], sequences: Sequence[Sequence[int]], errors: Errors) -> Verdict | None:
    """The verdict on the best set-ups of a search, or None if one side has no set-up that fits."""
    fitting = [(one, one.result) for one in found if one.result is not None]
    best = [Best(one.strategy, one.parallelism, result.tokens_per_second, result.attention) for one, result in fitting]
    return verdict_on(best, sequences, errors)


def verdict_on(best: Sequence[Best], sequences: Sequence[Sequence[int]], errors: Errors) -> Verdict | None:
    """The verdict on best set-ups, or None if one side has none."""
    sides = [[one for one in best if (one.strategy in OURS) == mine] for mine in (True, False)]
    if not all(sides):
        return None
    ours, other = (max(side, key=lambda one: one.tokens_per_second) for side in sides)
    speedup = ours.tokens_per_second / other.tokens_per_second
    interval = errors.of_ratio(speedup, alike=ours.parallelism == other.parallelism)
    return Verdict(ours.strategy, other.strategy, speedup, interval, _reason(other, sequences))


def _reason(other: Best, sequences: Sequence[Sequence[int]]) -> str | None:
    """Why balance of attention can bring little."""
    if other.attention < LITTLE:
        return f"attention takes {other.attention:.1%} of the step of {other.strategy}"
    pairs = [sum(n * (n + 1) // 2 for n in sequence) for sequence in sequences]
    if len(pairs) > 1 and max(pairs) <= (1 + LITTLE) * sum(pairs) / len(pairs):
        return "all sequences have equal attention"
    return None
