"""`distca simulate --search`: every strategy at its best set-up, and whether distca pays."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distca.apps.common import pictures
from distca.apps.common.workloads import draw_documents
from distca.errors import InvalidArgumentError
from distca.simulator.search import DIMENSIONS, Found, search
from distca.simulator.setup import Cluster, Model, Parallelism
from distca.simulator.validation import Errors, errors
from distca.simulator.verdict import OURS, Verdict, verdict_of

#: Tokens of a GPU in a step, by default: about those of the published batches of 4D parallelism.
_TOKENS = 65536


@dataclasses.dataclass(frozen=True)
class Searched:
    """What was searched, and what was found."""

    cluster: Cluster
    model: Model
    sequences: list[list[int]]
    found: list[Found]
    verdict: Verdict | None
    errors: Errors

    def as_json(self) -> dict[str, Any]:
        """All of it, marked as modelled."""
        values = {name: dataclasses.asdict(getattr(self, name)) for name in ("cluster", "model", "errors")}
        verdict = None if self.verdict is None else {**dataclasses.asdict(self.verdict), "pays": self.verdict.pays}
        found = [one.as_json() for one in self.found]
        return {"kind": "modelled", **values, "sequences": self.sequences, "strategies": found, "verdict": verdict}


def searched(options: argparse.Namespace, cluster: Cluster, model: Model, lengths: Sequence[int]) -> Searched:
    """Searches what the options leave open, on sequences that are drawn from these lengths."""
    for name in ("chunks", "parallelism"):
        if getattr(options, name) is not None:
            raise InvalidArgumentError(f"--search finds the parallelism: leave out --{name}")
    others = {"--sweep": options.sweep is not None, "--whole-optimizer": options.whole_optimizer}
    for other, is_given in (others | {"--save-attention": options.save_attention}).items():
        if is_given:
            raise InvalidArgumentError(f"--search has no {other}: leave out one of them")
    number = options.sequences or max(1, cluster.ranks * _TOKENS // options.tokens_per_rank)
    if options.steps < 1:
        raise InvalidArgumentError(f"--steps {options.steps}: a positive number is expected")
    sequences, *following = (
        draw_documents(lengths, number, options.tokens_per_rank, options.seed + step) for step in range(options.steps)
    )
    fixed = {name: getattr(options, name) for name in DIMENSIONS if getattr(options, name) not in (None, False)}
    chosen = None if options.strategies is None else options.strategies.split(",")
    found = search(
        sequences,
        cluster=cluster,
        model=model,
        strategies=chosen,
        fixed=fixed,
        tolerance=options.tolerance,
        following=following,
    )
    return Searched(cluster, model, sequences, found, verdict_of(found, sequences, errors()), errors())


def set_up_of(parallelism: Parallelism) -> str:
    """A set-up in a few letters.

    Examples:
        >>> from distca.apps.simulate.searching import set_up_of
        >>> from distca.simulator.setup import Parallelism
        >>> set_up_of(Parallelism(data=2, tensor=8, recompute=True))
        'd2 t8 recompute'
    """
    letters = {"d": "data", "c": "context", "t": "tensor", "p": "pipeline", "m": "micro_batches"}
    numbers = [f"{letter}{n}" for letter, name in letters.items() if (n := getattr(parallelism, name)) > 1]
    flags = [name for name in ("fsdp", "recompute") if getattr(parallelism, name)]
    return " ".join([*numbers, *flags]) or "one rank"


def table(made: Searched) -> str:
    """The best set-up of each strategy, what it does, and the verdict."""
    lines = [
        f"{'modelled, not measured':22} {'step':>9} {'interval':>15} {'relative':>8} {'interval':>13} {'tokens/s':>11} "
        f"{'MFU':>6} {'idle: most':>10} {'mean':>6} {'exposed':>8} {'in nodes':>10} {'between':>10} {'memory':>8} "
        f"{'padding':>8}  set-up"
    ]
    fitting = [one for one in made.found if one.result is not None]
    first = fitting[0]
    for one in made.found:
        result = one.result
        if result is None:
            lines.append(f"{one.strategy:22} {f'no set-up fits; {one.too_large:,} do not':>9}")
            continue
        seconds = made.errors.of_seconds(result.seconds)
        assert first.result is not None
        ratio = result.seconds / first.result.seconds
        interval = made.errors.of_ratio(ratio, alike=one.parallelism == first.parallelism)
        within = f"{interval}" if one is not first else ""
        assert one.parallelism is not None
        lines.append(
            f"{one.strategy:22} {result.seconds:8.3f}s {f'{seconds.least:.2f} to {seconds.most:.2f}s':>15} "
            f"{ratio:8.3f} {within:>13} {result.tokens_per_second:11,.0f} {result.mfu:6.1%} "
            f"{max(result.idle):10.1%} {statistics.mean(result.idle):6.1%} {result.exposed_communication:8.1%} "
            f"{result.bytes_inside / 1e9:7,.0f} GB {result.bytes_between / 1e9:7,.0f} GB "
            f"{result.memory.total / 1e9:5,.0f} GB {result.padding:8.1%}  {set_up_of(one.parallelism)}"
        )
    tried, slower, large = (sum(getattr(one, name) for one in made.found) for name in ("tried", "slower", "too_large"))
    lines.append(
        f"{tried + slower + large:,} set-ups: {tried:,} modelled, {slower:,} that cannot be faster, {large:,} that do "
        "not fit into the memory"
    )
    lines.append(
        f"intervals: the largest errors against steps that ran on two CPU ranks ({made.errors.seconds:.1%} of a time, "
        f"{made.errors.unlike:.1%} of a ratio, {made.errors.alike:.1%} if set-ups are the same); no GPU run "
        "was compared"
    )
    if made.verdict is not None:
        lines.append(str(made.verdict))
    return "\n".join(lines)


def draw(made: Searched, path: Path) -> None:
    """Draws tokens a second of each strategy with their intervals, and where the time goes.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    fitting = [(one.strategy, one.result) for one in made.found if one.result is not None]
    figure = pictures.new_figure(11, 1.6 + 0.42 * len(fitting), 110)
    rates, shares = figure.subplots(1, 2)
    for row, (name, result) in enumerate(fitting):
        colour = pictures.PLANNED if name in OURS else pictures.AT_HOME
        least, most = result.tokens_per_second, result.tokens_per_second
        least, most = least * (1 - made.errors.seconds), most * (1 + made.errors.seconds)
        rates.barh(row, result.tokens_per_second, color=colour)
        rates.plot([least, most], [row, row], color=pictures.INK, linewidth=1.2)
        idle = statistics.mean(result.idle)
        shares.barh(row, 1 - idle, color=pictures.COMPUTE)
        shares.barh(row, idle, left=1 - idle, color=pictures.WAIT)
    for axes, label in ((rates, "tokens a second"), (shares, "share of the step")):
        axes.set_yticks(range(len(fitting)), [name for name, _ in fitting])
        axes.invert_yaxis()
        axes.set_xlabel(label)
        pictures.plain(axes, "each strategy at its best set-up (modelled)")
    keys = [
        Patch(color=pictures.PLANNED, label="distca"),
        Patch(color=pictures.AT_HOME, label="other strategies"),
        Patch(color=pictures.COMPUTE, label="computes"),
        Patch(color=pictures.WAIT, label="idle"),
    ]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")
