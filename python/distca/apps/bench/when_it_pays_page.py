"""Tables and a picture of `distca bench when-it-pays`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.apps.common import pictures
from distca.apps.simulate.searching import set_up_of
from distca.simulator.setup import Parallelism
from distca.simulator.validation import errors
from distca.simulator.verdict import OURS, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The parts, and what differs in each.
PARTS = {
    "documents": "documents (Llama 8B, 64 GPUs, 128K)",
    "grid": "model, context, GPUs",
    "kernels": "kernels (Llama 8B, 64 GPUs, 512K)",
    "links": "links (Llama 8B, 64 GPUs, 512K)",
    "delay": "steps (Llama 8B, 64 GPUs, 128K)",
}
#: The comparison of which all best set-ups are shown.
DETAILED = ("grid", "llama-8b, 128K, 64 GPUs")
#: The bars of a comparison, and their colours.
SHOWN = {
    "unbalanced": pictures.AT_HOME,
    "all-gather": pictures.DISPATCH,
    "ring": pictures.ROWS,
    "ulysses-ring": pictures.HALVES[1],
    "hybrid-context": pictures.OPTIMIZER,
    "wlb": pictures.COLLECT,
    "distca": pictures.PLANNED,
}


def tables(content: dict[str, Any]) -> list[str]:
    """Tokens a second of a GPU by part, strategy and comparison; then one comparison with its set-ups."""
    cells = content["details"]["cells"]
    lines = ["Tokens a second of a GPU, each strategy at its best set-up; all **modelled**."]
    for part, what in PARTS.items():
        of_part = [cell for cell in cells if cell["part"] == part]
        if not of_part:
            continue
        names = list(dict.fromkeys(one["strategy"] for cell in of_part for one in _fitting(cell)))
        lines += ["", f"| {what} | {' | '.join(names)} | speed-up, interval | pays |", "|---" * (len(names) + 3) + "|"]
        lines += [_row(cell, names) for cell in of_part]
    for cell in cells:
        if (cell["part"], cell["name"]) == DETAILED:
            lines += ["", f"The best set-ups of {cell['name']}:", ""]
            lines += [
                "| strategy | step | MFU | mean idle | exposed | between nodes | memory | set-up |",
                "|---" * 8 + "|",
            ]
            lines += [_detail(one) for one in _fitting(cell)]
    return lines


def _fitting(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """The strategies of the first draw of which some set-up fits."""
    return [one for one in cell["draws"][0]["strategies"] if one["result"] is not None]


def best_of(cell: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fastest strategy of distca, and the fastest other one."""
    ours, others = (
        max(
            (one for one in _fitting(cell) if (one["strategy"] in OURS) == mine),
            key=lambda one: float(one["result"]["tokens_per_second"]),
        )
        for mine in (True, False)
    )
    return ours, others


def _row(cell: dict[str, Any], names: Sequence[str]) -> str:
    rates = {one["strategy"]: one["result"]["tokens_per_second"] for one in _fitting(cell)}
    ours, other = best_of(cell)
    speedup = rates[ours["strategy"]] / rates[other["strategy"]]
    interval = errors().of_ratio(speedup, alike=ours["parallelism"] == other["parallelism"])
    columns = [f"{rates[name] / cell['gpus']:,.0f}" if name in rates else "-" for name in names]
    verdict = Verdict(ours["strategy"], other["strategy"], speedup, interval, cell["draws"][0]["verdict"]["reason"])
    figure = f"{verdict.ours} / {verdict.other} {speedup:.3f}, {interval}"
    return f"| {cell['name']} | {' | '.join(columns)} | {figure} | {'yes' if verdict.pays else 'no'} |"


def _detail(one: dict[str, Any]) -> str:
    result = one["result"]
    shares = " | ".join(f"{100 * share:.0f} %" for share in (result["idle"]["mean"], result["exposed_communication"]))
    return (
        f"| {one['strategy']} | {result['seconds']:.2f} s | {100 * result['mfu']:.1f} % | {shares} | "
        f"{result['bytes_between'] / 1e9:,.0f} GB | {sum(result['memory'].values()) / 1e9:.0f} GB | "
        f"{set_up_of(Parallelism(**one['parallelism']))} |"
    )


def draw(content: dict[str, Any], path: Path) -> None:
    """Draws tokens a second of some strategies over those of distca, for documents and for the grid.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    cells = content["details"]["cells"]
    parts = [[cell for cell in cells if cell["part"] == part] for part in ("documents", "grid")]
    figure = pictures.new_figure(15, 4.6, 110)
    for axes, of_part, title in zip(
        figure.subplots(1, 2, width_ratios=[max(1, len(part)) for part in parts], sharey=True),
        parts,
        ("llama-8b on 64 GPUs, modelled", "published list as scaled (modelled)"),
        strict=True,
    ):
        _draw_part(axes, of_part)
        pictures.plain(axes, title, grid=True)
    keys = [Patch(color=colour, label=name) for name, colour in SHOWN.items()]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")


def _draw_part(axes: Axes, cells: list[dict[str, Any]]) -> None:
    width = 0.8 / len(SHOWN)
    for place, cell in enumerate(cells):
        rates = {one["strategy"]: one["result"]["tokens_per_second"] for one in _fitting(cell)}
        ours = best_of(cell)[0]["result"]["tokens_per_second"]
        for number, (name, colour) in enumerate(SHOWN.items()):
            rate = ours if name == "distca" else rates.get(name, 0.0)
            axes.bar(place + (number - len(SHOWN) / 2 + 0.5) * width, rate / ours, width=0.92 * width, color=colour)
    axes.axhline(1, color=pictures.INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(cells)), [cell["name"].replace(", ", "\n") for cell in cells], fontsize=7)
    axes.set_ylabel("tokens a second / distca's best")
