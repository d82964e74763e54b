"""The figures of one case: what was hidden, what the order of calls allows, and what ranks waited for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import distca
from distca.apps.bench.overlap.cases import LATENCY, Measured
from distca.apps.bench.overlap.paired import KINDS, PHASES, Estimate, Paired
from distca.apps.bench.overlap.schedule import messages_of, pass_of, play
from distca.trace.causes import Causes


class Figures(NamedTuple):
    """The figures of a phase or of a whole step.

    Attributes:
        seconds: of a step without a link, median.
        attention: seconds of attention in it, of the rank that computes most.
        traffic: seconds in which the busiest rank's rows are on the link.
        hidden: the share of `traffic` that costs no time.
        bound: the share that would be hidden if nothing took time but computation and rows on the link.
        signals: what messages of one byte add to a step without a link, as a share of it.
        waits: what a rank waits in each kind of step, mean of the ranks, as shares of `seconds`.
    """

    seconds: float
    attention: float
    traffic: float
    hidden: Estimate
    bound: float
    signals: Estimate
    waits: dict[str, Causes]

    @property
    def ratio(self) -> float:
        """Seconds on the link for each second of attention."""
        return self.traffic / self.attention

    def as_json(self) -> dict[str, Any]:
        """All figures by name."""
        return {
            **self._asdict(),
            "hidden": self.hidden._asdict(),
            "signals": self.signals._asdict(),
            "waits": {kind: causes._asdict() for kind, causes in self.waits.items()},
        }


def paired_of(ranks: Sequence[Measured]) -> Paired:
    """The steps of all ranks at one speed of the link."""
    return Paired(*(steps_of(ranks, kind) for kind in KINDS))


def steps_of(ranks: Sequence[Measured], kind: str) -> list[tuple[distca.Trace, ...]]:
    """The steps of a kind: for each round the traces of all ranks."""
    return list(zip(*(rank.kinds[kind] for rank in ranks), strict=True))


def figures_of(ranks: Sequence[Measured], plans: Sequence[distca.Plan]) -> dict[str, Figures]:
    """The figures of a case, for ``forward``, ``backward`` and the whole ``step``.

    Args:
        ranks: what each rank measured.
        plans: the plan of each half.
    """
    paired = paired_of(ranks)
    lost = {phase: _lost(paired, plans, ranks[0].link_speed, phase) for phase in PHASES}
    lost["step"] = sum(lost.values())
    return {name: _of_phase(paired, name, lost[name]) for name in (*PHASES, "step")}


def _lost(paired: Paired, plans: Sequence[distca.Plan], speed: float, phase: str) -> float:
    """Seconds that the order of calls cannot hide."""
    of, messages = pass_of(paired.one_byte, phase), messages_of(plans, phase)
    rows, signals = (play(of, messages, distca.Link(speed, LATENCY, signal_only)) for signal_only in (False, True))
    return rows - signals


def _of_phase(paired: Paired, name: str, lost: float) -> Figures:
    phase = None if name == "step" else name
    seconds, traffic = paired.seconds("without", phase), paired.traffic(phase)
    return Figures(
        seconds,
        paired.attention(phase),
        traffic,
        paired.hidden(phase),
        1 - lost / traffic,
        paired.signals(phase).scaled(1 / seconds),
        {kind: Causes(*(wait / seconds for wait in paired.waits(kind, phase))) for kind in KINDS},
    )


def lines_of(figures: dict[str, Figures]) -> list[str]:
    """The figures as text, a line for forward, backward and the step."""
    head = ("", "traffic / attention", "hidden, median [interval]", "bound", "one byte - no link")
    rows: list[Sequence[str]] = [head]
    for name, of in figures.items():
        rows.append((name, f"{of.ratio:.2f}", str(of.hidden), f"{of.bound:.3f}", f"{of.signals.median:+.1%}"))
    waits: list[Sequence[str]] = [("waits", *(f"{kind.replace('_', ' ')}: rows, peer" for kind in KINDS))]
    for name, of in figures.items():
        shares = (f"{of.waits[kind].rows:.1%}, {of.waits[kind].peer:.1%}" for kind in KINDS)
        waits.append((name, *shares))
    return [*_columns(rows), "", *_columns(waits)]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
