"""Draws what `distca bench when-it-pays` has written: ``python -m distca.apps.bench.when_it_pays_picture``.

It reads benchmarks/results/when-it-pays.json and writes docs/pictures/when-it-pays.png. It needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.apps.common import pictures
from distca.simulator.verdict import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path("benchmarks/results/when-it-pays.json")
PICTURE = Path("docs/pictures/when-it-pays.png")
#: The bars of a comparison, and their colours.
SHOWN = {
    "unbalanced": pictures.AT_HOME,
    "all-gather": pictures.DISPATCH,
    "ring": pictures.ROWS,
    "hybrid-context": pictures.OPTIMIZER,
    "wlb": pictures.COLLECT,
    "distca": pictures.PLANNED,
}


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draws tokens a second of some strategies over those of distca, for documents and for the grid."""
    from matplotlib.patches import Patch

    figure = pictures.new_figure(13, 4.6, 110)
    for axes, part, title in zip(
        figure.subplots(1, 2, width_ratios=(4, 8), sharey=True),
        ("documents", "grid"),
        ("llama-8b on 64 GPUs, by documents (modelled)", "published list as scaled (modelled)"),
        strict=True,
    ):
        _draw_part(axes, [cell for cell in cells if cell["part"] == part])
        pictures.plain(axes, title, grid=True)
    keys = [Patch(color=colour, label=name) for name, colour in SHOWN.items()]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path)


def _draw_part(axes: Axes, cells: list[dict[str, Any]]) -> None:
    width = 0.8 / len(SHOWN)
    for place, cell in enumerate(cells):
        rates = {
            one["strategy"]: one["result"]["tokens_per_second"]
            for one in cell["draws"][0]["strategies"]
            if one["result"] is not None
        }
        ours = max(rate for name, rate in rates.items() if name in OURS)
        for number, (name, colour) in enumerate(SHOWN.items()):
            rate = ours if name == "distca" else rates.get(name, 0.0)
            axes.bar(place + (number - len(SHOWN) / 2 + 0.5) * width, rate / ours, width=0.92 * width, color=colour)
    axes.axhline(1, color=pictures.INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(cells)), [cell["name"].replace(", ", "\n") for cell in cells], fontsize=8)
    axes.set_ylabel("tokens a second / distca's best")


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text())["details"]["cells"], PICTURE)
