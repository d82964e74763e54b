"""The picture of the sweep: what was hidden, by traffic, beside what the order of calls allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.apps.bench.overlap.paired import PHASES
from distca.apps.common.pictures import AT_HOME, INK, PLANNED, ROWS, legend_below, new_figure, plain, save

if TYPE_CHECKING:
    from distca.apps.bench.overlap.sweep import Case

_LEAST = -0.1  # what is below is drawn at the lower end


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draws a panel for each kind of ranks and each phase, with a colour for each mix of documents."""
    from matplotlib.lines import Line2D

    hows = list(dict.fromkeys((len(case.ranks.documents), case.ranks.how) for case in cases))
    mixes = dict(zip(dict.fromkeys(case.ranks.mix for case in cases), (PLANNED, ROWS), strict=False))
    figure = new_figure(4.6 * len(PHASES), 3.1 * len(hows) + 0.4)
    panels = figure.subplots(len(hows), len(PHASES), squeeze=False, sharex=True, sharey=True)
    for row, (number, how) in zip(panels, hows, strict=True):
        for axes, phase in zip(row, PHASES, strict=True):
            axes.axhline(0.9, color=AT_HOME, linewidth=0.8)
            for mix, colour in mixes.items():
                chosen = [c for c in cases if (len(c.ranks.documents), c.ranks.how, c.ranks.mix) == (number, how, mix)]
                of = [case.figures[phase] for case in chosen]
                x, hidden = [one.ratio for one in of], [one.hidden for one in of]
                around = [[one.median - one.low for one in hidden], [one.high - one.median for one in hidden]]
                axes.plot(x, [one.bound for one in of], color=colour, linestyle="--", linewidth=1.2)
                axes.errorbar(x, [one.median for one in hidden], yerr=around, color=colour, marker="o", capsize=3)
            axes.set_ylim(_LEAST, 1.15)
            plain(axes, f"{number} ranks that {how}: {phase}", grid=True)
        row[0].set_ylabel("share of the traffic hidden")
    for axes in panels[-1]:
        axes.set_xlabel("time on the link / time of attention, in the phase")
    keys = [Line2D([], [], color=colour, marker="o", label=mix) for mix, colour in mixes.items()]
    keys.append(Line2D([], [], color=INK, linestyle="--", label="what the order of calls allows"))
    keys.append(Line2D([], [], color=AT_HOME, linewidth=0.8, label="0.9"))
    legend_below(figure, keys)
    save(figure, path)
