"""What a run's report says of the ticks of a pipeline: their loads, and who worked, served and waited when."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distca.apps.common import pictures
from distca.pipeline import PipelinePlans, TickTime
from distca.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "ticks.png"
_SERVED = pictures.HALVES[1]
_BOX, _LINE, _GAP = 0.5, 0.14, 0.14  # heights of what a rank does, of its attention or waits, and between ranks


@dataclass(frozen=True)
class TickLoads:
    """The attention of a tick: its largest load over the mean."""

    name: str
    before: float  # every row computed at home
    after: float  # as planned


def loads_of_ticks(plans: PipelinePlans) -> list[TickLoads]:
    """The loads of each tick. A tick without attention has 1."""
    found = []
    for number, (tick, stats) in enumerate(zip(plans.table, plans.stats.ticks, strict=True)):
        work = " ".join("." if one is None else f"{one.microbatch}" for one in tick.work)
        mean = stats.mean
        before, after = (stats.largest_before / mean, stats.largest / mean) if mean else (1.0, 1.0)
        found.append(TickLoads(f"{number} {tick.phase}, micro-batches {work}", before, after))
    return found


def paragraphs(plans: PipelinePlans, picture: bool) -> list[str]:
    """The section of the report, in Markdown: the table of ticks, the loads of each, and the picture."""
    rows = [f"| {tick.name} | {tick.before:.2f} | {tick.after:.2f} |" for tick in loads_of_ticks(plans)]
    parts = [
        "## Ticks",
        "The table of the last step. `F0` is forward of micro-batch 0, and a stage with `.` serves.",
        "```text\n" + str(plans.table) + "\n```",
        "Largest attention load of each tick over the mean, with every row computed at home and as planned. A tick "
        "names the micro-batch of each stage.",
        "\n".join(["| tick | before | after |", "| --- | --- | --- |", *rows]),
    ]
    return [*parts, *([f"![Who worked, who served and who waited in each tick]({PICTURE})"] if picture else [])]


def draw_ticks(path: Path, plans: PipelinePlans, times: Sequence[Sequence[TickTime]], traces: Sequence[Trace]) -> bool:
    """Draws what each process did in the ticks of one step, and the loads of the ticks. It needs matplotlib.

    Args:
        path: the file of the picture.
        plans: the plans of the step.
        times: for each process the times of the ticks.
        traces: for each process its trace, which has the step.

    Returns:
        Whether the picture was drawn: matplotlib is installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.patches import Patch

    figure = pictures.new_figure(14.0, 2.6 + (_BOX + _LINE + _GAP) * len(times))
    above, below = figure.subplots(2, 1, height_ratios=((_BOX + _LINE + _GAP) * len(times), 1.1))
    begin = min(of_rank[0].begin for of_rank in times)
    end = max(of_rank[-1].end for of_rank in times)
    names = []
    for row, (rank, of_rank) in enumerate(reversed(list(enumerate(times)))):
        bottom = row * (_BOX + _LINE + _GAP)
        _draw_rank(above, bottom, of_rank, traces[rank], begin, end)
        names.append((bottom + _LINE + _BOX / 2, f"rank {rank}"))
    above.set_xlim(0, (end - begin) * 1e3)
    above.set_yticks([at for at, _ in names], [name for _, name in names], fontsize=9)
    above.set_xlabel("milliseconds")
    pictures.plain(above, "What every process did in the ticks of a step")
    _draw_loads(below, loads_of_ticks(plans))
    keys = [
        Patch(color=pictures.FORWARD, label="forward of its stage"),
        Patch(color=pictures.BACKWARD, label="backward of its stage"),
        Patch(color=_SERVED, label="served"),
        Patch(color=pictures.ATTEND, label="computed attention"),
        Patch(color=pictures.WAIT, label="waited"),
        Patch(color=pictures.AT_HOME, label="largest load, every row at home"),
        Patch(color=pictures.PLANNED, label="as planned"),
    ]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path)
    return True


def _draw_rank(axes: Axes, bottom: float, times: Sequence[TickTime], trace: Trace, begin: float, end: float) -> None:
    def bars(spans: Sequence[tuple[float, float]], at: float, height: float, colour: str) -> None:
        scaled = [((first - begin) * 1e3, (last - first) * 1e3) for first, last in spans]
        axes.broken_barh(scaled, (at, height), facecolors=colour, edgecolors="white", linewidth=0.4)

    for tick in times:
        colour = _SERVED
        if tick.work is not None:
            colour = pictures.FORWARD if tick.phase == "forward" else pictures.BACKWARD
        bars([(tick.begin, tick.end)], bottom + _LINE, _BOX, colour)
        if tick.work is not None:
            chunk = "" if tick.work.chunk == 0 else "'" * tick.work.chunk
            name = f"{tick.phase[0].upper()}{tick.work.microbatch}{chunk}"
            middle = ((tick.begin + tick.end) / 2 - begin) * 1e3
            axes.text(middle, bottom + _LINE + _BOX / 2, name, ha="center", va="center", fontsize=8, color=pictures.INK)
    inside = [span for span in trace.spans if begin <= span.begin and span.end <= end]
    attended = [(span.begin, span.end) for span in inside if span.name == "attend" and not span.is_wait]
    waits = [(span.begin, span.end) for span in inside if span.is_wait]
    bars(attended, bottom, _LINE, pictures.ATTEND)
    bars(waits + [(tick.computed, tick.end) for tick in times], bottom, _LINE, pictures.WAIT)


def _draw_loads(axes: Axes, loads: Sequence[TickLoads]) -> None:
    numbers = range(len(loads))
    axes.bar([number - 0.2 for number in numbers], [tick.before for tick in loads], 0.4, color=pictures.AT_HOME)
    axes.bar([number + 0.2 for number in numbers], [tick.after for tick in loads], 0.4, color=pictures.PLANNED)
    axes.set_xticks(list(numbers), [str(number) for number in numbers], fontsize=8)
    axes.set_xlabel("tick")
    axes.set_ylabel("largest / mean")
    pictures.plain(axes, grid=True)
