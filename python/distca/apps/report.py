"""The command `distca report`: states and draws what the ranks of a traced run did."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from distca.apps.common.options import add_debug
from distca.errors import InvalidArgumentError
from distca.trace.timeline import (
    PICTURE,
    TRACE,
    Window,
    after_warm_up,
    figures,
    lines_below_table,
    rows_of_table,
    windows,
)
from distca.trace.trace import Trace, read_trace

_HOW = (
    "`distca train --trace` writes a trace into the run's folder. In your own loop, call context.start_trace(), "
    "context.take_trace() and distca.write_trace"
)


def add_command(commands: Any) -> None:
    """Adds `report` to the parser of the command line."""
    command = commands.add_parser(
        "report",
        help="show what each rank of a traced run did when, and how long it waited",
        description="Draws a trace as a timeline (PNG). Prints for each rank the share of time in which it idled, "
        "and how much of the traffic was hidden behind compute. Prints how evenly attention was spread over the "
        "ranks, as planned and as measured.",
    )
    command.add_argument("run_or_trace", metavar="RUN", type=Path, help="the folder of a run, or the file of a trace")
    command.add_argument(
        "--steps",
        type=_range_of(int),
        metavar="A[-B]",
        help="training steps to draw and to print figures for (default: the picture shows the last traced step; the "
        "figures leave out the first traced step, which has one-time costs)",
    )
    command.add_argument(
        "--between",
        type=_range_of(float),
        metavar="A-B",
        help="part of the picture to zoom in on, in milliseconds from its start",
    )
    command.add_argument("--ranks", type=_ranks, metavar="0,1,6", help="ranks to draw (default: all)")
    command.add_argument(
        "--out", type=Path, metavar="PNG", help=f"file for the picture (default: {PICTURE} beside the trace)"
    )
    command.add_argument("--no-picture", action="store_true", help="print the figures only; needs no matplotlib")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if not options.no_picture and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("the picture needs matplotlib: pip install matplotlib, or give --no-picture")
    file = find_trace(options.run_or_trace)
    traces = read_trace(file)
    everything = windows(traces)
    drawn, stated = everything[-1:], after_warm_up(everything)
    if options.steps is not None:
        drawn = stated = _chosen(everything, options.steps)
    found = figures(traces, stated)
    print(f"{file}: {len(traces)} ranks, {_named(stated)}")
    rows = rows_of_table(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n".join(lines_below_table(found)))
    if not options.no_picture:
        from distca.apps.common.timeline_picture import draw_timeline

        out = options.out or file.with_name(PICTURE)
        draw_timeline(out, _of_ranks(traces, options.ranks), drawn, options.between)
        print(f"{_named(drawn)} drawn in {out}")
    return 0


def find_trace(run_or_trace: Path) -> Path:
    """The trace in a run's folder, or the file itself. Raises InvalidArgumentError, which says what was expected."""
    if run_or_trace.is_file():
        return run_or_trace
    if not run_or_trace.is_dir():
        raise InvalidArgumentError(f"there is no {run_or_trace}; a run's folder or a trace is expected. {_HOW}")
    if not (run_or_trace / TRACE).is_file():
        what = (
            "the run was not traced" if (run_or_trace / "config.json").is_file() else "that is not the folder of a run"
        )
        raise InvalidArgumentError(f"{run_or_trace} has no {TRACE}: {what}. {_HOW}")
    return run_or_trace / TRACE


def _chosen(everything: list[Window], wanted: tuple[int, int]) -> list[Window]:
    first, last = wanted
    numbers = [window.number for window in everything if window.number is not None]
    if not numbers:
        raise InvalidArgumentError(
            "--steps: the trace does not say where training steps begin (Trace.of_step adds that)"
        )
    if first > last or first not in numbers or last not in numbers:
        raise InvalidArgumentError(f"--steps is {first}-{last}; the trace has {numbers[0]} to {numbers[-1]}")
    return [window for window in everything if window.number is not None and first <= window.number <= last]


def _of_ranks(traces: list[Trace], wanted: list[int] | None) -> list[Trace]:
    ranks = [trace.rank for trace in traces]
    if wanted is not None and not set(wanted) <= set(ranks):
        raise InvalidArgumentError(f"--ranks is {','.join(map(str, wanted))}; the trace has {ranks[0]} to {ranks[-1]}")
    return [trace for trace in traces if wanted is None or trace.rank in wanted]


def _named(chosen: list[Window]) -> str:
    numbers = [window.number for window in chosen]
    if numbers == [None]:
        return "the whole trace"
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _range_of(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> tuple[Any, Any]:
        first, dash, last = text.partition("-")
        return kind(first), kind(last if dash else first)

    read.__name__ = "range"  # the name by which argparse calls a wrong value
    return read


def _ranks(text: str) -> list[int]:
    return [int(rank) for rank in text.split(",")]
