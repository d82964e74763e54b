"""A published figure beside what the simulator makes of it."""

from __future__ import annotations

import dataclasses

from distca.apps.bench.harness import Row

#: How far a hit may be from the published figure.
HIT = 0.25
#: Below it documents of the published list are short.
SHORT = 65536


@dataclasses.dataclass(frozen=True)
class Beside:
    """A figure as published and as modelled. A range has two ends.

    Attributes:
        name: what it is.
        least, most: the published figure, or the ends of its range.
        modelled: the modelled one.
        base: what counts is how far figures are above it: 1 for ratios of which one figure was published.
    """

    name: str
    least: float
    most: float
    modelled: float
    base: float = 0.0

    @property
    def hit(self) -> bool:
        """Whether it is near or inside what was published."""
        slack = HIT * (self.least - self.base) if self.least == self.most else 0.0
        return self.least - slack <= self.modelled <= self.most + slack

    @property
    def row(self) -> Row:
        """It as a line of a table."""
        said = f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"
        said = said.replace(" to inf", " or more")
        return Row(f"{self.name}: published {said}, {'hit' if self.hit else 'miss'}; modelled", self.modelled, "")


def scaled_as_published(lengths: list[int], context: int) -> list[int]:
    """The lengths that the paper draws from, at so many tokens of context, made of the published list."""
    kept = [n for n in lengths if n < SHORT][::2] + 4 * [n for n in lengths if n >= SHORT]
    return [min(context, max(2, n * context // SHORT)) for n in kept]
