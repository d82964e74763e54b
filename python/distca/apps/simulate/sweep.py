"""`distca simulate --sweep`: speed-ups over the first strategy, over numbers of ranks or longest documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from distca.apps.common import pictures
from distca.errors import InvalidArgumentError
from distca.simulator.simulate import StrategyResult

#: What can be swept, and how an axis calls it.
SWEPT = {"gpus": "GPUs", "longest": "tokens of the longest document"}
_COLOURS = (pictures.AT_HOME, pictures.ROWS, pictures.COLLECT, pictures.DISPATCH, pictures.PLANNED)

Sweep = Mapping[int, Sequence[StrategyResult]]
"""The results by the value that is swept."""


def parse(text: str) -> tuple[str, list[int]]:
    """What is swept, and its values.

    Raises:
        InvalidArgumentError: the text is not of the form ``gpus=16,32``.
    """
    name, _, listed = text.partition("=")
    try:
        values = [int(one) for one in listed.split(",")]
    except ValueError:
        values = []
    if name not in SWEPT or not values or not 1 <= min(values) <= max(values) <= 2**31:
        raise InvalidArgumentError(f"--sweep {text}: gpus=N,N or longest=N,N with numbers from 1 to 2^31 are allowed")
    return name, values


def scaled(lengths: Sequence[int], longest: int) -> list[int]:
    """Lengths times a factor that makes the longest one so long."""
    most = max(lengths)
    return [max(1, n * longest // most) for n in lengths]


def table(name: str, sweep: Sweep) -> str:
    """The time of each strategy over that of the first, by value."""
    strategies = [result.strategy for result in next(iter(sweep.values()))]
    lines = [f"modelled, not measured: time of {strategies[0]} / time, by {SWEPT[name]}"]
    lines.append(f"{'':12}" + "".join(f"{strategy:>17}" for strategy in strategies))
    for value, results in sweep.items():
        lines.append(f"{value:<12,}" + "".join(f"{results[0].seconds / one.seconds:17.3f}" for one in results))
    return "\n".join(lines)


def draw(name: str, sweep: Sweep, path: Path) -> None:
    """Draws the same as lines.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    figure = pictures.new_figure(7, 4.2)
    axes = figure.subplots()
    for number, first in enumerate(next(iter(sweep.values()))):
        speedups = [results[0].seconds / results[number].seconds for results in sweep.values()]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(list(sweep), speedups, marker="o", color=colour, label=first.strategy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sweep), [f"{value:,}" for value in sweep])
    axes.set_xlabel(SWEPT[name])
    axes.set_ylabel(f"speed-up over {next(iter(sweep.values()))[0].strategy}")
    pictures.plain(axes, "a step of training (modelled)", grid=True)
    pictures.legend_below(figure, axes.get_legend_handles_labels()[0])
    pictures.save(figure, path, "--plot")
