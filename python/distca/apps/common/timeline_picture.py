"""The picture of a trace: what each rank did when, and which rows were under way. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.apps.common import pictures
from distca.errors import InvalidArgumentError
from distca.trace.timeline import Window
from distca.trace.trace import SentRows, Span, Trace, TrainingPhase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

_PHASES = {"forward": pictures.FORWARD, "backward": pictures.BACKWARD, "optimizer": pictures.OPTIMIZER}
_PARTS = {
    "compute": pictures.COMPUTE,
    "dispatch": pictures.DISPATCH,
    "attend": pictures.ATTEND,
    "collect": pictures.COLLECT,
}
_HALVES = ("first half", "second half")
_HATCH = "////"  # marks the second half for readers who cannot tell the hues apart

# Heights in inches. The top of a rank is the band of its phases. Below it is a lane for each half of ping-pong (one
# lane without ping-pong), and at the bottom its rows under way. A lane has the layers at its top, below them what the
# rank does, and the waits drawn over that.
_PHASE, _LAYER, _DOES, _WAITS, _SENDS, _GAP = 0.18, 0.17, 0.36, 0.11, 0.11, 0.05
_BETWEEN_RANKS = 0.2
_MOST_NAMED = 8  # with at most this many ranks, each row has its own name

_WIDTH, _DPI = 14.0, 130
_PIXELS = 0.86 * _WIDTH * _DPI  # width of the axes, roughly
_PIXELS_OF_LETTER = 7.5


@dataclass(frozen=True)
class _View:
    """The part of the trace that is drawn: seconds [begin, end), labelled in milliseconds since `origin`."""

    axes: Axes
    origin: float
    begin: float
    end: float

    def bars(
        self,
        spans: Iterable[Span | SentRows | TrainingPhase | _Layer],
        bottom: float,
        height: float,
        colour: str,
        **style: Any,
    ) -> None:
        """Draws a bar for each span that is in view."""
        self.axes.broken_barh(
            [((first - self.origin) * 1e3, (last - first) * 1e3) for first, last in map(self._cut, self._seen(spans))],
            (bottom, height),
            facecolors=colour,
            **style,
        )

    def names(self, spans: Iterable[tuple[Span | TrainingPhase | _Layer, Sequence[str]]], middle: float) -> None:
        """Writes, in the middle of each span that is in view, the longest of its names that fits."""
        for span, names in spans:
            for first, last in map(self._cut, self._seen([span])):
                pixels = (last - first) / (self.end - self.begin) * _PIXELS
                fitting = [name for name in names if len(name) * _PIXELS_OF_LETTER < pixels]
                if fitting:
                    at = ((first + last) / 2 - self.origin) * 1e3
                    name = max(fitting, key=len)
                    self.axes.text(at, middle, name, ha="center", va="center_baseline", fontsize=7, color=pictures.INK)

    def _seen(self, spans: Iterable[Any]) -> list[Any]:
        return [span for span in spans if span.begin < self.end and span.end > self.begin]

    def _cut(self, span: Any) -> tuple[float, float]:
        return max(span.begin, self.begin), min(span.end, self.end)


@dataclass
class _Layer:
    """A step of attention under way, from its dispatch to the end of its collect."""

    layer: int | str | None
    half: int | None
    begin: float
    end: float

    @property
    def names(self) -> list[str]:
        """The long and the short name. The integration of transformers names a layer by number and module type."""
        if self.layer is None:
            return []
        name = str(self.layer).split(" ")[0]
        return [f"layer {name}", name]


def draw_timeline(
    path: Path, traces: Sequence[Trace], of: Sequence[Window], between: tuple[float, float] | None = None
) -> None:
    """Draws ranks' traces in neighbouring windows, as a PNG or in another format that the file's ending asks for.

    Args:
        path: the file of the picture.
        traces: one trace for each rank, from `distca.read_trace` or as recorded. Phases, layers and halves are shown if
            the traces have them.
        of: the windows, in order.
        between: milliseconds from the first window's begin to draw; by default all.

    Raises:
        InvalidArgumentError: nothing would be seen, or the file cannot be written.
    """
    origin = of[0].begin
    begin, end = _seconds(origin, of[-1].end, between)
    num_lanes = 2 if any(span.half is not None for trace in traces for span in trace.spans) else 1
    of_rank = _PHASE + num_lanes * (_LAYER + _DOES + _GAP) + _SENDS + _BETWEEN_RANKS
    figure = pictures.new_figure(_WIDTH, 1.5 + of_rank * len(traces), _DPI)
    axes = figure.subplots()
    view = _View(axes, origin, begin, end)
    ticks: list[tuple[float, str]] = []
    for row, trace in enumerate(reversed(traces)):
        rows = _draw_rank(view, row * of_rank, trace, num_lanes)
        if len(traces) > _MOST_NAMED:
            rows = [((row + 0.45) * of_rank, f"rank {trace.rank}")]
        ticks += rows
        axes.axhline(row * of_rank - _BETWEEN_RANKS / 2, color=pictures.GRID, linewidth=0.8, zorder=0)
    top = len(traces) * of_rank - _BETWEEN_RANKS / 2
    for window in of:
        if window.number is not None:
            _mark_step(view, window, top)
    axes.set_xlim((begin - origin) * 1e3, (end - origin) * 1e3)
    axes.set_ylim(-_BETWEEN_RANKS / 2, top + 0.1)
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=9)
    axes.set_xlabel("milliseconds")
    pictures.plain(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    keys = _keys(traces, num_lanes)
    pictures.legend_below(figure, keys, -(-len(keys) // 2) if len(keys) > 7 else None)
    pictures.save(figure, path)


def _seconds(origin: float, end: float, between: tuple[float, float] | None) -> tuple[float, float]:
    """The seconds [begin, end) of the windows that are drawn."""
    if between is None:
        return origin, end
    if not 0 <= between[0] < between[1] or origin + between[0] * 1e-3 >= end:
        raise InvalidArgumentError(
            f"milliseconds {between[0]:g} to {between[1]:g} of a window of {(end - origin) * 1e3:.1f} ms: there is "
            "nothing to draw"
        )
    return origin + between[0] * 1e-3, min(end, origin + between[1] * 1e-3)


def _draw_rank(view: _View, bottom: float, trace: Trace, num_lanes: int) -> list[tuple[float, str]]:
    """Draws a rank from this height upwards. Returns the heights of its rows and their names."""
    view.bars((*trace.transfers, *trace.copies), bottom, _SENDS, pictures.ROWS)
    rows = [(bottom + _SENDS / 2, "rows sent")] if trace.transfers or trace.copies else []
    at = bottom + _SENDS + _GAP
    lanes = num_lanes * (_LAYER + _DOES + _GAP) - _GAP
    layers = _layers(trace.spans)
    for lane in reversed(range(num_lanes)):
        half = lane if num_lanes > 1 else None
        _draw_lane(view, at, [span for span in trace.spans if span.half == half], half)
        mine = [layer for layer in layers if layer.half == half]
        hue = pictures.HALVES[lane]
        view.bars(mine, at + _DOES, _LAYER, hue, edgecolors="white", linewidth=0.8, hatch=_HATCH if lane else None)
        view.names(((layer, layer.names) for layer in mine), at + _DOES + _LAYER / 2)
        rows.append((at + _DOES / 2, f"rank {trace.rank}" if half is None else _HALVES[half]))
        at += _LAYER + _DOES + _GAP
    if num_lanes > 1:  # spans that belong to neither half take the height of both
        common = [span for span in trace.spans if span.half is None]
        _draw_lane(view, bottom + _SENDS + _GAP, common, None, lanes)
    for name, colour in _PHASES.items():
        mine_phases = [phase for phase in trace.phases if phase.name == name]
        view.bars(mine_phases, at, _PHASE, colour, edgecolors="white", linewidth=0.8)
        view.names(((phase, [name]) for phase in mine_phases), at + _PHASE / 2)
    if num_lanes > 1:
        rows.append((at + _PHASE / 2, f"rank {trace.rank}"))
    return rows


def _draw_lane(view: _View, bottom: float, spans: Sequence[Span], half: int | None, height: float = _DOES) -> None:
    for name, colour in _PARTS.items():
        mine = [span for span in spans if span.name == name and not span.is_wait]
        view.bars(mine, bottom, height, colour, edgecolors="white", linewidth=0.4)
    view.bars((span for span in spans if span.is_wait), bottom, _WAITS, pictures.WAIT)


def _layers(spans: Iterable[Span]) -> list[_Layer]:
    """Steps of attention whose layer or half is known."""
    found: dict[int, _Layer] = {}
    for span in spans:
        if span.is_wait or span.step < 0 or (span.layer is None and span.half is None):
            continue
        step = found.setdefault(span.step, _Layer(span.layer, span.half, span.begin, span.end))
        step.begin, step.end = min(step.begin, span.begin), max(step.end, span.end)
    return list(found.values())


def _keys(traces: Sequence[Trace], num_lanes: int) -> list[Patch]:
    """Keys of the legend, only for what the traces can have."""
    from matplotlib.patches import Patch

    known = {phase.name for trace in traces for phase in trace.phases}
    keys = [Patch(color=colour, label=name) for name, colour in _PHASES.items() if name in known]
    if num_lanes > 1:
        keys += [
            Patch(facecolor=hue, label=f"a layer's attention, {name}", hatch=hatch, edgecolor="white")
            for hue, name, hatch in zip(pictures.HALVES, _HALVES, (None, _HATCH), strict=True)
        ]
    elif any(span.layer is not None for trace in traces for span in trace.spans):
        keys.append(Patch(color=pictures.HALVES[0], label="a layer's attention"))
    keys += [
        Patch(color=colour, label="outside of attention" if name == "compute" else name)
        for name, colour in _PARTS.items()
    ]
    keys.append(Patch(color=pictures.WAIT, label="waits in them"))
    if any(trace.transfers or trace.copies for trace in traces):
        keys.append(Patch(color=pictures.ROWS, label="its rows under way"))
    return keys


def _mark_step(view: _View, window: Window, top: float) -> None:
    if view.begin <= window.begin <= view.end:
        at = (window.begin - view.origin) * 1e3
        view.axes.axvline(at, color=pictures.INK, linewidth=0.8, linestyle=(0, (4, 3)))
    middle = (max(window.begin, view.begin) + min(window.end, view.end)) / 2
    if view.begin <= middle <= view.end:
        label = f"step {window.number}, {window.seconds * 1e3:.1f} ms"
        at = (middle - view.origin) * 1e3
        view.axes.text(at, top + 0.1, label, ha="center", va="bottom", fontsize=9, color=pictures.INK)
