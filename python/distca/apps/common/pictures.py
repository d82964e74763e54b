"""What all pictures share: colours, figures without pyplot, and the loads of ranks. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.errors import InvalidArgumentError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#333740", "#e4e6ea"
AT_HOME, PLANNED = "#b8bcc4", "#2563a8"
"""Colours of loads: every row computed at home, and as planned."""

FORWARD, BACKWARD, OPTIMIZER = "#c6d0e2", "#929fbb", "#66718a"
DISPATCH, ATTEND, COLLECT = "#7fb2de", PLANNED, "#5b9a68"
COMPUTE, WAIT, ROWS = "#cfd3da", "#d5483c", "#e0a030"
HALVES = ("#9fd8cf", "#d3bbea")
"""Colours of the first and the second half of ping-pong."""

_MOST_BARS = 16  # at most this many ranks have a bar each; more ranks are drawn as one line
_MOST_NUMBERS = 8


def new_figure(width: float, height: float, dpi: int = 130) -> Figure:
    """A figure of `width` by `height` inches, made without pyplot, which would keep it and choose a global backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, option: str = "") -> None:
    """Writes the picture in the format of the file's ending.

    Raises:
        InvalidArgumentError: the file cannot be written. The message begins with the option that named it, if any.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{option} {path} cannot be written: {error}".lstrip()) from error


def plain(axes: Axes, title: str = "", *, grid: bool = False) -> None:
    """Sets the style of all axes: two spines in ink, and horizontal grid lines if they are asked for."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)
    axes.set_title(title, fontsize=11)
    if grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)


def draw_loads(axes: Axes, before: Sequence[int], after: Sequence[int], title: str) -> None:
    """Draws the attention load of each rank, relative to the mean: with every row computed at home, and as planned."""
    shares = shares_of(before), shares_of(after)
    draw_of_ranks(axes, [(of, colour) for of, colour in zip(shares, (AT_HOME, PLANNED), strict=True)], number="%.2f")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylabel("load / mean load")
    axes.set_ylim(0, 1.12 * max(*shares[0], *shares[1], 1.0))
    plain(axes, title)


def draw_of_ranks(axes: Axes, values: Sequence[tuple[Sequence[float], str]], number: str) -> None:
    """Draws a bar for each rank in each of two series (values, colour). `number` formats the figures on the bars."""
    from matplotlib.ticker import MaxNLocator

    for (of_ranks, colour), shift in zip(values, (-0.19, 0.19), strict=True):
        ranks = len(of_ranks)
        if ranks > _MOST_BARS:
            axes.step(range(ranks + 1), [*of_ranks, of_ranks[-1]], where="post", color=colour, linewidth=1.4)
            axes.set_xlim(0, ranks)
            continue
        bars = axes.bar([rank + shift for rank in range(ranks)], of_ranks, width=0.36, color=colour)
        if ranks <= _MOST_NUMBERS:
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # keeps lines from crossing the number
            axes.bar_label(bars, fmt=number, padding=2, fontsize=7 if ranks > 4 else 8, color=INK, bbox=behind)
        axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_xlabel("rank")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def keys_of_loads() -> list[Artist]:
    """Keys of the legend for what `draw_loads` draws."""
    from matplotlib.patches import Patch

    return [Patch(color=AT_HOME, label="every row computed at home"), Patch(color=PLANNED, label="as planned")]


def legend_below(figure: Figure, keys: Sequence[Artist], columns: int | None = None) -> None:
    """Adds a legend outside of all axes, where it covers nothing."""
    figure.legend(handles=keys, loc="outside lower center", ncols=columns or len(keys), frameon=False, fontsize=9)


def shares_of(loads: Sequence[int]) -> list[float]:
    """Loads relative to their mean; zeros if there is no load."""
    mean = sum(loads) / len(loads) if loads else 0.0
    return [load / mean if mean else 0.0 for load in loads]
