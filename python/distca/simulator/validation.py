"""How far modelled figures may be off: the errors of the steps that were modelled and also run.

The steps are those of `distca bench simulator`, on two CPU ranks. No step on a GPU was compared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@dataclasses.dataclass(frozen=True)
class Interval:
    """Where a figure lies if the model errs no more than it did against what ran."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.2f} to {self.most:.2f}"


@dataclasses.dataclass(frozen=True)
class Errors:
    """The largest errors against what ran, as fractions of what was measured.

    Attributes:
        seconds: of the time of a step.
        unlike: of the ratio of two steps that differ in more than their strategy.
        alike: of the ratio of two steps that differ in their strategy alone.
    """

    seconds: float
    unlike: float
    alike: float

    @classmethod
    def of_bench(cls, *contents: Mapping[str, Any]) -> Errors:
        """The errors in what runs of ``distca bench simulator --json`` have written.

        The bench gives each step as a ratio to its first one, which has other documents, another model or another
        parallelism. Therefore a step's error is that of a ratio of unlike steps.
        """
        steps = [one for content in contents for one in content["details"]["steps"]]
        gains = [pair for content in contents for pair in content["details"]["balanced_over_unbalanced"].values()]
        return cls(
            seconds=max(abs(one["modelled_seconds"] / one["measured_seconds"] - 1) for one in steps),
            unlike=max(abs(one["error"]) for one in steps),
            alike=max(abs(modelled / measured - 1) for measured, modelled in gains),
        )

    def of_seconds(self, modelled: float) -> Interval:
        """Where the time of a step lies."""
        return _around(modelled, self.seconds)

    def of_ratio(self, modelled: float, *, alike: bool) -> Interval:
        """Where the ratio of two steps lies; `alike` if they differ in their strategy alone."""
        return _around(modelled, self.alike if alike else self.unlike)


def _around(modelled: float, error: float) -> Interval:
    # An error is modelled over measured, less 1.
    return Interval(modelled / (1 + error), modelled / (1 - error))


@functools.cache
def errors() -> Errors:
    """The errors of the runs of the bench whose figures docs/simulator.md shows."""
    return Errors(**json.loads((files("distca.simulator") / "presets" / "errors.json").read_text())["errors"])
