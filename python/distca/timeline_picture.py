"""The picture of a trace: what every rank did when, and which rows were under way. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.errors import InvalidArgumentError
from distca.timeline import Intervals, Window
from distca.trace import SentRows, Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT = "#333740", "#e4e6ea"
_COLOURS = {
    "compute": "#c9ced8",
    "dispatch": "#7fb2de",
    "attend": "#2563a8",
    "collect": "#5b9a68",
    "wait": "#d5483c",
    "rows sent": "#e0a030",
}
_LEGEND = {
    "compute": "between steps of attention",
    "dispatch": "dispatch",
    "attend": "attend",
    "collect": "collect",
    "wait": "waits in them",
    "rows sent": "its rows under way",
}
# Of a rank's unit of height: what it does, over the lower part of that its waits, and below all its rows under way.
_DOES, _WAITS, _SENDS = (0.32, 0.56), (0.32, 0.38), (0.08, 0.18)


def draw_timeline(
    path: Path, traces: Sequence[Trace], of: Sequence[Window], between: tuple[float, float] | None = None
) -> None:
    """Draws ranks' traces, one a rank, in neighbouring windows as a PNG or what else the file's ending asks for.

    Args:
        path: of the picture.
        traces: from `distca.read_trace`, or as recorded.
        of: the windows, in order.
        between: milliseconds from the first window's begin to draw; by default all.

    Raises:
        InvalidArgumentError: where nothing would be seen, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    origin, end = of[0].begin, of[-1].end
    if between is not None:
        if not 0 <= between[0] < between[1] or origin + between[0] * 1e-3 >= end:
            raise InvalidArgumentError(
                f"milliseconds {between[0]:g} to {between[1]:g} of a window of {(end - origin) * 1e3:.1f} ms: there is "
                "nothing to draw"
            )
        begin, end = origin + between[0] * 1e-3, min(end, origin + between[1] * 1e-3)
    else:
        begin = origin

    # Without pyplot, which would keep the figure and choose a backend for the whole process.
    figure = Figure(figsize=(14, 1.6 + 0.9 * len(traces)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, trace in enumerate(reversed(traces)):
        _draw_rank(axes, row, trace, origin, begin, end)
    for window in of:
        if window.number is not None:
            _mark_step(axes, window, origin, begin, end, len(traces))
    axes.set_xlim((begin - origin) * 1e3, (end - origin) * 1e3)
    axes.set_ylim(0, len(traces) + 0.12)
    axes.set_yticks([row + 0.5 for row in range(len(traces))], [f"rank {trace.rank}" for trace in reversed(traces)])
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.tick_params(colors=_INK)
    axes.tick_params(axis="y", length=0)
    shown = [name for name in _LEGEND if name != "rows sent" or any(t.transfers or t.copies for t in traces)]
    keys = [Patch(color=_COLOURS[name], label=_LEGEND[name]) for name in shown]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be written: {error}") from error


def _draw_rank(axes: Axes, row: int, trace: Trace, origin: float, begin: float, end: float) -> None:
    def bars(spans: Iterable[Span | SentRows], where: tuple[float, float], colour: str, edge: float = 0.0) -> None:
        shown: Intervals = [(max(s.begin, begin), min(s.end, end)) for s in spans if s.begin < end and s.end > begin]
        axes.broken_barh(
            [((first - origin) * 1e3, (last - first) * 1e3) for first, last in shown],
            (row + where[0], where[1]),
            facecolors=colour,
            edgecolors="white",
            linewidth=edge,
        )

    for name in ("compute", "dispatch", "attend", "collect"):
        bars((span for span in trace.spans if span.name == name and not span.is_wait), _DOES, _COLOURS[name], 0.4)
    bars((span for span in trace.spans if span.is_wait), _WAITS, _COLOURS["wait"])
    bars((*trace.transfers, *trace.copies), _SENDS, _COLOURS["rows sent"])
    axes.axhline(row, color=_FAINT, linewidth=0.8, zorder=0)


def _mark_step(axes: Axes, window: Window, origin: float, begin: float, end: float, num_ranks: int) -> None:
    if begin <= window.begin <= end:
        axes.axvline((window.begin - origin) * 1e3, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    middle = (max(window.begin, begin) + min(window.end, end)) / 2
    if begin <= middle <= end:
        label = f"step {window.number}, {window.seconds * 1e3:.1f} ms"
        axes.text((middle - origin) * 1e3, num_ranks + 0.02, label, ha="center", va="bottom", fontsize=9, color=_INK)
