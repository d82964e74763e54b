"""Tables and a picture of `distca bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from distca.apps.bench.scaling import CONTEXTS, GPUS, Point, points_of
from distca.apps.common import pictures

_COLOURS = dict(zip(CONTEXTS, (pictures.AT_HOME, pictures.ROWS, pictures.COLLECT, pictures.PLANNED), strict=True))
_LINES: dict[str, Literal["-", ":"]] = {"list": "-", "paper": ":"}


def tables(content: dict[str, Any]) -> list[str]:
    """A table for each number of stages, with a row for each model, list and context."""
    points = points_of(content["details"])
    command = content["command"].split(" --json")[0]
    lines = [f"All figures are **modelled**: `{command}`, means of {content['details']['draws']} draws."]
    for stages in sorted({point.stages for point in points}):
        of_stages = [point for point in points if point.stages == stages]
        micro_batches = content["details"]["micro_batches"][str(stages)]
        what = "No pipeline" if stages == 1 else f"{stages} stages, {micro_batches} micro-batches"
        lines += ["", f"**{what}.**", ""]
        gpus = [number for number in GPUS if any(point.gpus == number for point in of_stages)]
        lines.append("| model, list, context | " + " | ".join(f"{number} GPUs" for number in gpus) + " |")
        lines.append("|---|" + "---|" * len(gpus))
        found = {(point.model, point.lengths, point.context, point.gpus): point for point in of_stages}
        for model, lengths, context in dict.fromkeys(key[:3] for key in found):
            cells = [found.get((model, lengths, context, number)) for number in gpus]
            name = f"{model.removeprefix('llama-').upper()}, {lengths}, {_context(context)}"
            lines.append(f"| {name} | " + " | ".join(map(_cell, cells)) + " |")
    return lines


def _cell(point: Point | None) -> str:
    """Idle shares of attention of ping-pong and of a single stream, that of the faster bold; and its bound."""
    if point is None:
        return "-"
    shares = {name: f"{100 * way.idle:.1f}" for name, way in point.ways.items()}
    shares[point.better] = f"**{shares[point.better]}**"
    better = point.ways[point.better]
    fill = f", fill {100 * better.fill:.0f}" if point.stages > 1 else ""
    return f"{' / '.join(shares.values())}{fill}: {better.bound} {better.port:.2f}"


def _context(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 2**20 else f"{tokens // 2**20}M"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draws the idle share of attention of the faster way over the GPUs, for each model and number of stages.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.lines import Line2D

    points = points_of(content["details"])
    models, stages = (list(dict.fromkeys(of)) for of in zip(*((p.model, p.stages) for p in points), strict=True))
    figure = pictures.new_figure(9, 0.6 + 3 * len(stages), 110)
    grid = figure.subplots(len(stages), len(models), squeeze=False, sharey=True)
    for row, number in zip(grid, stages, strict=True):
        for axes, model in zip(row, models, strict=True):
            for context, colour in _COLOURS.items():
                for lengths, line in _LINES.items():
                    wanted = (model, number, context, lengths)
                    of = [p for p in points if (p.model, p.stages, p.context, p.lengths) == wanted]
                    shares = [100 * p.ways[p.better].idle for p in of]
                    axes.plot([p.gpus for p in of], shares, line, marker="o", markersize=3, color=colour)
            axes.set_xscale("log", base=2)
            axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
            axes.minorticks_off()
            what = "no pipeline" if number == 1 else f"{number} stages"
            pictures.plain(axes, f"{model}, {what} (modelled)", grid=True)
        row[0].set_ylabel("attention's idle share, %")
    for axes in grid[-1]:
        axes.set_xlabel("GPUs")
    keys = [Line2D([], [], color=colour, label=f"context {_context(n)}") for n, colour in _COLOURS.items()]
    names = {"list": "the list", "paper": "as the paper draws"}
    keys += [Line2D([], [], color=pictures.INK, linestyle=line, label=names[of]) for of, line in _LINES.items()]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")
