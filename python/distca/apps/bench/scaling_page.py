"""Tables and a picture of `distca bench scaling`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from distca.apps.bench.scaling import CONTEXTS, GPUS, HOMES, MOST_DRAWN, Point, points_of
from distca.apps.common import pictures

_COLOURS = dict(zip(CONTEXTS, (pictures.AT_HOME, pictures.ROWS, pictures.COLLECT, pictures.PLANNED), strict=True))
_LINES: dict[str, Literal["-", ":"]] = {"list": "-", "paper": ":"}


def tables(content: dict[str, Any]) -> list[str]:
    """Tables for each number of stages: idle shares on both kinds of homes, and what the second kind saves."""
    points = points_of(content["details"])
    command = content["command"].split(" --json")[0]
    draws = f"means of {content['details']['draws']} draws; above {MOST_DRAWN} GPUs a single draw"
    lines = [f"All figures are **modelled**: `{command}`, {draws}."]
    for stages in sorted({point.stages for point in points}):
        micro_batches = content["details"]["micro_batches"][str(stages)]
        what = "No pipeline" if stages == 1 else f"{stages} stages, {micro_batches} micro-batches"
        packed, spread = ([p for p in points if (p.stages, p.homes) == (stages, kind)] for kind in HOMES)
        lines += ["", f"**{what}: the step on homes of `spread`, over that on packed homes.**", ""]
        lines += _table(spread, functools.partial(_over, others=packed))
        for kind, of_kind in zip(HOMES, (packed, spread), strict=True):
            lines += ["", f"**{what}: idle shares, {kind} homes.**", "", *_table(of_kind, _cell)]
    return lines


def _table(points: list[Point], cell: Callable[[Point], str]) -> list[str]:
    """A row for each model, list and context, with a cell for each number of GPUs."""
    gpus = [number for number in GPUS if any(point.gpus == number for point in points)]
    lines = ["| model, list, context | " + " | ".join(f"{number:,} GPUs" for number in gpus) + " |"]
    lines.append("|---|" + "---|" * len(gpus))
    found = {(point.model, point.lengths, point.context, point.gpus): point for point in points}
    for model, lengths, context in dict.fromkeys(key[:3] for key in found):
        of_gpus = [found.get((model, lengths, context, number)) for number in gpus]
        name = f"{model.removeprefix('llama-').upper()}, {lengths}, {_context(context)}"
        lines.append(f"| {name} | " + " | ".join("-" if p is None else cell(p) for p in of_gpus) + " |")
    return lines


def _over(point: Point, others: list[Point]) -> str:
    """The time of the faster way over that of the same step on other homes, and both idle shares of attention."""
    other = next(other for other in others if other.step == point.step)
    ours, theirs = point.ways[point.better], other.ways[other.better]
    return f"{ours.seconds / theirs.seconds:.2f}: {100 * theirs.idle:.0f} -> {100 * ours.idle:.0f} %"


def _cell(point: Point) -> str:
    """Idle shares of attention of ping-pong and of a single stream, that of the faster bold; and its bound."""
    shares = {name: f"{100 * way.idle:.1f}" for name, way in point.ways.items()}
    shares[point.better] = f"**{shares[point.better]}**"
    better = point.ways[point.better]
    fill = f", fill {100 * better.fill:.0f}" if point.stages > 1 else ""
    return f"{' / '.join(shares.values())}{fill}: {better.bound} {better.port:.2f}"


def _context(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 2**20 else f"{tokens // 2**20}M"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draws the idle share of attention of the faster way over the GPUs, for each model, number of stages and homes.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.lines import Line2D

    points = points_of(content["details"])
    models, rows = list(dict.fromkeys(p.model for p in points)), sorted({(p.stages, p.homes) for p in points})
    figure = pictures.new_figure(9, 0.6 + 2.4 * len(rows), 110)
    grid = figure.subplots(len(rows), len(models), squeeze=False, sharey=True)
    for row, (number, homes) in zip(grid, rows, strict=True):
        for axes, model in zip(row, models, strict=True):
            for context, colour in _COLOURS.items():
                for lengths, line in _LINES.items():
                    wanted = (model, number, homes, context, lengths)
                    of = [p for p in points if (p.model, p.stages, p.homes, p.context, p.lengths) == wanted]
                    shares = [100 * p.ways[p.better].idle for p in of]
                    axes.plot([p.gpus for p in of], shares, line, marker="o", markersize=3, color=colour)
            axes.set_xscale("log", base=2)
            axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
            axes.minorticks_off()
            what = "no pipeline" if number == 1 else f"{number} stages"
            pictures.plain(axes, f"{model}, {what}, {homes} homes (modelled)", grid=True)
        row[0].set_ylabel("attention's idle share, %")
    for axes in grid[-1]:
        axes.set_xlabel("GPUs")
    keys = [Line2D([], [], color=colour, label=f"context {_context(n)}") for n, colour in _COLOURS.items()]
    names = {"list": "the list", "paper": "as the paper draws"}
    keys += [Line2D([], [], color=pictures.INK, linestyle=line, label=names[of]) for of, line in _LINES.items()]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")
