"""What a run leaves for people: `report.md`, and `plan.png` with the attention load of each rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distca.timeline import PICTURE as TIMELINE
from distca.timeline import TRACE, Figures, lines_below_table, rows_of_table, windows
from distca.timeline_picture import draw_timeline
from distca.trace import Trace
from distca.train.config import TrainConfig, option_name
from distca.train.metrics import AttentionLoads, StepMetrics

PICTURE = "plan.png"
_BEFORE, _AFTER, _INK = "#b8bcc4", "#2563a8", "#333740"


def missing_packages() -> list[str]:
    """What cannot be written for want of a package, in words."""
    wanted = {"matplotlib": f"no {PICTURE}", "tensorboard": "no TensorBoard events"}
    return [
        f"{what}: the package {package} is not installed (distca[train] has it)"
        for package, what in wanted.items()
        if importlib.util.find_spec(package) is None
    ]


def write_report(
    run_dir: Path, config: TrainConfig, summary: dict[str, Any], steps: list[StepMetrics], loads: AttentionLoads
) -> None:
    """Writes `report.md` and, where matplotlib is installed, `plan.png`; `loads` are those of the last step."""
    picture = importlib.util.find_spec("matplotlib") is not None
    if picture:
        draw_plan(run_dir / PICTURE, steps, loads)
    how = "was interrupted" if summary["interrupted"] else "finished"
    parts = [
        f"# {run_dir.name}",
        f"The run {how} after {summary['steps']} of {config.steps} steps on {config.ranks} ranks.",
        "## Figures",
        _table(("figure", "value"), _figures(summary)),
        "## Attention",
        _table(
            ("rank", "load before", "load after"),
            [(str(rank), *pair) for rank, pair in enumerate(zip(*_relative(loads), strict=True))],
        ),
        f"Load of each rank in the last step, relative to the mean over ranks. The largest moved from "
        f"{max(_shares(loads.before)):.2f} to {max(_shares(loads.after)):.2f}.",
    ]
    if picture:
        parts.append(f"![Attention load of each rank before and after balancing]({PICTURE})")
    options = {option_name(name): value for name, value in config.as_json().items()}
    parts += [
        "## Configuration",
        _table(
            ("option", "value"), [(f"`{name}`", "" if value is None else str(value)) for name, value in options.items()]
        ),
        "## Files",
        "[metrics.jsonl](metrics.jsonl) (one line a step), [summary.json](summary.json), [config.json](config.json)",
    ]
    parts += [f"Note: {note}." for note in summary["notes"]]
    (run_dir / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def add_timeline(run_dir: Path, traces: Sequence[Trace], found: Figures) -> None:
    """Adds to `report.md` what ranks did in the traced steps, and draws the last of them where matplotlib is there."""
    head, *rows = rows_of_table(found)
    parts = [
        "## Timeline",
        f"Steps {found.numbers[0]} to {found.numbers[-1]}, traced. Waits outside of attention, for gradients say, are "
        "not told from compute.",
        _table(head, rows),
        *(f"{line[0].upper()}{line[1:]}." for line in lines_below_table(found)),
    ]
    if importlib.util.find_spec("matplotlib") is not None:
        last = windows(traces)[-1:]
        draw_timeline(run_dir / TIMELINE, traces, last)
        parts.append(f"![What every rank did in step {last[0].number}]({TIMELINE})")
    parts.append(f"[{TRACE}]({TRACE}): open it in [Perfetto](https://ui.perfetto.dev), or see `distca report`.")
    with open(run_dir / "report.md", "a", encoding="utf-8") as report:
        report.write("\n" + "\n\n".join(parts) + "\n")


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
    return figures


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _relative(loads: AttentionLoads) -> tuple[list[str], list[str]]:
    before, after = ([f"{share:.3f}" for share in _shares(of)] for of in (loads.before, loads.after))
    return before, after


def _shares(loads: list[int]) -> list[float]:
    """Loads relative to their mean; zeros where there is no load."""
    mean = sum(loads) / len(loads)
    return [load / mean if mean else 0.0 for load in loads]


def draw_plan(path: Path, steps: list[StepMetrics], loads: AttentionLoads) -> None:
    """Left the load of each rank in the last step before and after balancing, right the imbalance of every step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    # Without pyplot, which would keep the figure and choose a backend for the whole process.
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ranks, over_time = figure.subplots(1, 2, width_ratios=(1, 1.25))

    before, after = _shares(loads.before), _shares(loads.after)
    for shares, shift, colour in ((before, -0.19, _BEFORE), (after, 0.19, _AFTER)):
        bars = ranks.bar([rank + shift for rank in range(len(shares))], shares, width=0.36, color=colour)
        if len(shares) <= 8:
            ranks.bar_label(bars, fmt="%.2f", padding=2, fontsize=8, color=_INK)
    ranks.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ranks.set_title(f"Attention load of each rank, step {steps[-1].step}")
    ranks.set_xlabel("rank")
    ranks.set_ylabel("load / mean load")
    ranks.set_ylim(0, 1.12 * max(*before, *after, 1.0))

    numbers = [step.step for step in steps]
    for values, colour in (
        ([step.imbalance_before for step in steps], _BEFORE),
        ([step.imbalance_after for step in steps], _AFTER),
    ):
        over_time.plot(numbers, values, color=colour, linewidth=1.6, marker="o" if len(steps) == 1 else None)
    over_time.fill_between(
        numbers,
        [step.imbalance_before for step in steps],
        [step.imbalance_after for step in steps],
        color=_BEFORE,
        alpha=0.18,
        linewidth=0,
    )
    over_time.set_title("Imbalance of every step")
    over_time.set_xlabel("step")
    over_time.set_ylabel("largest load / mean load")
    over_time.set_ylim(bottom=0.95)

    for axes in (ranks, over_time):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        axes.tick_params(colors=_INK)
        axes.title.set_fontsize(11)
    over_time.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    over_time.set_axisbelow(True)
    keys = [Patch(color=_BEFORE, label="every row computed at home"), Patch(color=_AFTER, label="as planned")]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)
