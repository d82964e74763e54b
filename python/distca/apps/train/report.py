"""The report of a run for people: `report.md`, `loss.png`, and `plan.png` with the attention load of each rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import sysconfig
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distca.apps.common import pictures
from distca.apps.common.machine import setting
from distca.apps.common.timeline_picture import draw_timeline
from distca.apps.train.config import TINY, TrainConfig, option_name
from distca.apps.train.metrics import AttentionLoads, StepMetrics
from distca.trace.timeline import PICTURE as TIMELINE
from distca.trace.timeline import TRACE, Figures, lines_below_table, rows_of_table, windows
from distca.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE, LOSS = "plan.png", "loss.png"


def missing_packages() -> list[str]:
    """What cannot be written because a package is missing, in words."""
    wanted = {"matplotlib": f"no {PICTURE} and no {LOSS}", "tensorboard": "no TensorBoard events"}
    return [
        f"{what}: the package {package} is not installed: pip install {package}"
        for package, what in wanted.items()
        if importlib.util.find_spec(package) is None
    ]


def write_report(
    run_dir: Path,
    config: TrainConfig,
    summary: dict[str, Any],
    steps: list[StepMetrics],
    loads: AttentionLoads,
    attention: str,
    more: Sequence[str] = (),
) -> None:
    """Writes `report.md` and, if matplotlib is installed, its pictures.

    `loads` are those of the last step. `attention` is what the context computes it with. `more` are further
    paragraphs on attention.
    """
    picture = importlib.util.find_spec("matplotlib") is not None
    if picture:
        draw_plan(run_dir / PICTURE, steps, loads)
        draw_loss(run_dir / LOSS, steps)
    how = "was interrupted" if summary["interrupted"] else "finished"
    parts = [
        f"# {run_dir.name}",
        f"The run {how} after {summary['steps']} of {config.steps} steps on {config.ranks} ranks.",
        "## Figures",
        _table(("figure", "value"), _figures(summary)),
        *([f"![Loss of every step]({LOSS})"] if picture else []),
        "## Attention",
        _table(
            ("rank", "load before", "load after"),
            [(str(rank), *pair) for rank, pair in enumerate(zip(*_relative(loads), strict=True))],
        ),
        f"Load of each rank in the last step, relative to the mean over ranks. The largest moved from "
        f"{max(pictures.shares_of(loads.before)):.2f} to {max(pictures.shares_of(loads.after)):.2f}.",
    ]
    if picture:
        parts.append(f"![Attention load of each rank before and after balancing]({PICTURE})")
    parts += [
        *more,
        "## Command and configuration",
        f"    {command(config)}",
        _table(("option", "value"), [(f"`{name}`", value) for name, value in options_in_full(config).items()]),
        "## Machine and versions",
        _table(("", "of rank 0"), machine(attention)),
        "## Files",
        "[metrics.jsonl](metrics.jsonl) (one line a step), [summary.json](summary.json), [config.json](config.json)",
    ]
    parts += [f"Note: {note}." for note in summary["notes"]]
    _write(run_dir, "w", "\n\n".join(parts) + "\n")


def add_timeline(run_dir: Path, traces: Sequence[Trace], found: Figures) -> None:
    """Adds what ranks did in the traced steps to `report.md`, and draws the last one if matplotlib is installed."""
    head, *rows = rows_of_table(found)
    parts = [
        "## Timeline",
        f"Steps {found.numbers[0]} to {found.numbers[-1]} were traced. Waits outside of attention, such as those for "
        "gradients, count as compute.",
        _table(head, rows),
        *(f"{line[0].upper()}{line[1:]}." for line in lines_below_table(found)),
    ]
    if importlib.util.find_spec("matplotlib") is not None:
        last = windows(traces)[-1:]
        draw_timeline(run_dir / TIMELINE, traces, last)
        parts.append(f"![What every rank did in step {last[0].number}]({TIMELINE})")
    parts.append(f"[{TRACE}]({TRACE}): open it in [Perfetto](https://ui.perfetto.dev), or see `distca report`.")
    _write(run_dir, "a", "\n" + "\n\n".join(parts) + "\n")


def _write(run_dir: Path, mode: str, text: str) -> None:
    """Writes to `report.md`. Bytes of paths that are not UTF-8 are spelled out."""
    with open(run_dir / "report.md", mode, encoding="utf-8", errors="backslashreplace") as report:
        report.write(text)


def command(config: TrainConfig) -> str:
    """The command that starts such a run, with the options that are not the defaults."""
    words = ["distca", "train"]
    for option in fields(config):
        value, name = getattr(config, option.name), option_name(option.name)
        if value == option.default:
            continue
        if isinstance(value, bool):
            words.append(name if value else name.replace("--", "--no-", 1))
        else:
            words += [name, str(value)] if value != option.metadata["bare"] else [name]
    return shlex.join(words)


def options_in_full(config: TrainConfig) -> dict[str, str]:
    """Every option of the command line with the value that the run had, defaults included."""
    unset: dict[str, Any] = {
        "data": f"{sysconfig.get_path('stdlib')} (the Python standard library)",
        "doc_scale": config.kept_fraction,
        "accumulate": config.micro_batches,
        "warmup_steps": "none" if config.schedule == "constant" else config.warmup,
        "tokenizer": "none, tokens are bytes",
        "model": "a tiny Llama",
        "trace": "off",
        **{name: config.tiny(name) if config.model is None else "as the model has" for name in TINY},
    }
    found = {}
    for option in fields(config):
        value = getattr(config, option.name)
        if value is None:
            value = unset.get(option.name, "none")
        elif option.name == "trace":
            value = f"{TRACE} of the run" + (f", and {value}" if value else "")
        found[option_name(option.name)] = str(value)
    return found


def machine(attention: str) -> list[tuple[str, str]]:
    """Hardware and versions of this process, and what computes its attention."""
    facts = setting()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ("CPU", facts["cpu"]),
        ("cores", f"{facts['cores']} of {os.cpu_count()}, {facts['threads']} threads a rank"),
        ("memory", f"{gibibytes:.1f} GiB"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("attention by", attention),
        ("distca", facts["distca"]),
        ("torch", facts["torch"]),
        ("python", facts["python"]),
        ("transformers", importlib.metadata.version("transformers")),
    ]


def _draw_of_steps(axes: Axes, numbers: Sequence[int], values: Sequence[float], color: str) -> None:
    """Draws a line over the steps; a point if there is only one step."""
    from matplotlib.ticker import MaxNLocator

    axes.plot(numbers, values, color=color, linewidth=1.6, marker="o" if len(numbers) == 1 else None)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _figures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    figures = [
        ("loss, first steps", f"{summary['loss_first']:.4f}"),
        ("loss, last steps", f"{summary['loss_last']:.4f}"),
        ("time", f"{summary['seconds']:.1f} s"),
        ("tokens a second", f"{summary['tokens_per_second']:,.0f}"),
        ("imbalance before (largest attention load over the mean)", f"{summary['imbalance_before']:.3f}"),
        ("imbalance after", f"{summary['imbalance_after']:.3f}"),
        ("moved a step", f"{summary['bytes_per_step'] / 1e6:.2f} MB"),
        ("planning a step", f"{summary['plan_ms']:.2f} ms"),
    ]
    if (evaluated := summary.get("eval_loss")) is not None:
        figures.insert(2, (f"loss on documents held out, after step {summary['eval_step']}", f"{evaluated:.4f}"))
    if (larger := summary.get("larger_half")) is not None:
        figures.append(("ping-pong: part of the attention in the larger half", f"{larger:.3f}"))
    if (compare := summary.get("compare")) is not None:
        figures += [
            ("step time balanced (median)", f"{compare['seconds_balanced']:.4f} s"),
            ("step time unbalanced (median)", f"{compare['seconds_unbalanced']:.4f} s"),
            ("ratio (median of the pairs)", f"{compare['ratio']:.3f}"),
            ("largest relative difference of the losses", f"{compare['loss_difference']:.1e}"),
            ("largest relative difference of the gradient norms", f"{compare['gradient_difference']:.1e}"),
        ]
    if (compare := summary.get("compare_inside_stages")) is not None:
        figures += [
            ("step time balanced inside each stage (median)", f"{compare['seconds_inside_stages']:.4f} s"),
            ("ratio to it (median of the pairs)", f"{compare['ratio']:.3f}"),
        ]
    return figures


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def _relative(loads: AttentionLoads) -> tuple[list[str], list[str]]:
    before, after = ([f"{share:.3f}" for share in pictures.shares_of(of)] for of in (loads.before, loads.after))
    return before, after


def draw_plan(path: Path, steps: Sequence[StepMetrics], loads: AttentionLoads) -> None:
    """Draws, left, each rank's load in the last step before and after balancing; right, the imbalance of every step."""
    figure = pictures.new_figure(10, 4.2)
    ranks, over_time = figure.subplots(1, 2, width_ratios=(1, 1.25))
    pictures.draw_loads(ranks, loads.before, loads.after, f"Attention load of each rank, step {steps[-1].step}")
    numbers = [step.step for step in steps]
    before = [step.imbalance_before for step in steps]
    after = [step.imbalance_after for step in steps]
    for values, colour in ((before, pictures.AT_HOME), (after, pictures.PLANNED)):
        _draw_of_steps(over_time, numbers, values, color=colour)
    over_time.fill_between(numbers, before, after, color=pictures.AT_HOME, alpha=0.18, linewidth=0)
    over_time.set_ylabel("largest load / mean load")
    over_time.set_ylim(bottom=0.95)
    pictures.plain(over_time, "Imbalance of every step", grid=True)
    pictures.legend_below(figure, pictures.keys_of_loads())
    pictures.save(figure, path)


def draw_loss(path: Path, steps: Sequence[StepMetrics]) -> None:
    """Draws the loss of every step and, if the metrics have one, the loss of evaluation."""
    from matplotlib.lines import Line2D

    figure = pictures.new_figure(8, 3.6)
    axes = figure.subplots()
    _draw_of_steps(axes, [step.step for step in steps], [step.loss for step in steps], color=pictures.PLANNED)
    evaluated = [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]
    keys = [Line2D([], [], color=pictures.PLANNED, label="training, mean over a step's targets")]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), color=pictures.ROWS, linewidth=1.6, marker="o", markersize=4)
        keys.append(Line2D([], [], color=pictures.ROWS, marker="o", markersize=4, label="evaluation"))
    axes.set_ylabel("loss")
    pictures.plain(axes, "Loss", grid=True)
    pictures.legend_below(figure, keys)
    pictures.save(figure, path)
