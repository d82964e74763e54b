"""The picture of a plan: loads of ranks, traffic between them, and the memory that it takes. It needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distca.apps.common import pictures
from distca.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_plan(made: Plan, path: Path, *, ranks_per_node: int | None = None, capacity: int | None = None) -> None:
    """Draws each rank's load and arena, and the bytes of forward and backward between each two ranks.

    Args:
        made: the plan.
        path: the file of the picture.
        ranks_per_node: how many neighbouring ranks are one node; the borders of nodes are drawn.
        capacity: bytes that an arena may have, drawn beside the arenas.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = pictures.new_figure(15, 4.7, 110)
    loads, traffic, memory = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.2))
    stats = made.stats
    pictures.draw_loads(loads, stats.load_before, stats.load, "Attention load of each rank")
    _draw_traffic(traffic, made, ranks_per_node)
    arenas = {phase: [arena.total / 1e6 for arena in of_ranks] for phase, of_ranks in stats.arena_bytes.items()}
    colours = pictures.FORWARD, pictures.BACKWARD
    pictures.draw_of_ranks(memory, list(zip(arenas.values(), colours, strict=True)), number="%.3g")
    pictures.plain(memory, "Arena of each rank", grid=True)
    memory.set_ylabel("MB")
    most = max(map(max, arenas.values()))
    keys = [
        *pictures.keys_of_loads(),
        *(Patch(color=colour, label=f"arena, {phase}") for colour, phase in zip(colours, arenas, strict=True)),
    ]
    if capacity is not None:
        most = max(most, capacity / 1e6)
        memory.axhline(capacity / 1e6, color=pictures.WAIT, linewidth=1.2)
        label = f"capacity of an arena, {capacity / 1e6:,.1f} MB"
        keys.append(Line2D([], [], color=pictures.WAIT, label=label))
    memory.set_ylim(0, 1.12 * max(most, 1e-6))
    if ranks_per_node is not None and ranks_per_node < made.layout.num_ranks:
        keys.append(Line2D([], [], color=pictures.INK, linewidth=0.8, label="borders of nodes"))
    pictures.legend_below(figure, keys)
    pictures.save(figure, path, "--plot")


def _draw_traffic(axes: Axes, made: Plan, ranks_per_node: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    ranks = made.layout.num_ranks
    megabytes = torch.zeros(ranks, ranks, dtype=torch.float64)
    for transfer in made.transfers:
        megabytes[transfer.source, transfer.target] += transfer.bytes / 1e6
    image = axes.imshow(megabytes.tolist(), cmap="Blues", vmin=0, interpolation="nearest")
    for border in range(ranks_per_node, ranks, ranks_per_node) if ranks_per_node else ():
        axes.axhline(border - 0.5, color=pictures.INK, linewidth=0.8)
        axes.axvline(border - 0.5, color=pictures.INK, linewidth=0.8)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    pictures.plain(axes, "Traffic of one layer, forward and backward")
    axes.spines[["top", "right"]].set_visible(True)
    axes.spines[:].set_color(pictures.INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="MB", shrink=0.85)
