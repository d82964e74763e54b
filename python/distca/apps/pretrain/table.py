"""The table and the picture of a sweep: `python -m distca.apps.pretrain.table FOLDER`."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distca.apps.common import pictures
from distca.apps.pretrain.ways import RESULT, WAYS
from distca.errors import DistcaError

_COLUMNS = (
    "run",
    "way",
    "step",
    "spread",
    "distca's time / its",
    "imbalance",
    "uneven",
    "waits",
    "moved",
    "memory",
    "loss",
)
_NOTES = (
    "- *step*: median of the rounds; *spread*: distance of the quartiles over the median\n"
    "- *distca's time / its*: median over the rounds of the ratio of two times of one round\n"
    "- *imbalance*: the largest load of attention over the mean, as planned\n"
    "- *uneven*: (attention of the slowest rank - that of this rank), added up over the steps of attention, over the "
    "time of a training step; the mean over ranks, measured in one step\n"
    "- *waits*: what a rank waited in steps of attention, for rows and for others, over the time of the same training "
    "step; the mean over ranks\n"
    "- *moved*: bytes of attention's rows between ranks in a step\n"
    "- *memory*: {memory}, the peak of the rank that has most; the models of all ways are in it\n"
    "- *loss*: the largest relative difference to that of distca"
)
_OF_CPU = "resident memory"
_OF_GPU = "what torch has allocated on the GPU"


def write_table(folder: Path) -> str:
    """Writes `table.md`, `results.jsonl` and `ways.png` of the runs in a folder. Returns the table.

    Raises:
        DistcaError: there is no run in it.
    """
    found = {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob(f"*/{RESULT}"))}
    if not found:
        raise DistcaError(f"{folder} has no run with a {RESULT}")
    (folder / "results.jsonl").write_text("".join(json.dumps({"run": n} | r) + "\n" for n, r in found.items()))
    of_first = next(iter(found.values()))["setting"]
    on_gpu = of_first.get("gpu")
    where = on_gpu or f"{of_first['cpu']}, {of_first['cores']} cores"
    lines = [
        f"{where}; distca {of_first['distca']}, torch {of_first['torch']}, megatron-core {of_first['megatron']}",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *(_row(run, way, figures) for run, result in found.items() for way, figures in result["ways"].items()),
        "",
        _NOTES.format(memory=_OF_GPU if on_gpu else _OF_CPU),
    ]
    if not on_gpu:
        lines.append(
            "- *Megatron* on CPU ranks: its schedule, with PyTorch's attention of one document after the other; with "
            "CP_SIZE above 1 each document is cut head-tail over so many ranks, which gather all keys"
        )
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(folder / "ways.png", found)
    return text


def _row(run: str, way: str, figures: dict[str, Any]) -> str:
    cells = (
        run,
        way,
        f"{1e3 * statistics.median(figures['seconds']):.0f} ms",
        f"{figures['spread']:.2f}",
        f"{figures['ratio']:.3f}",
        _known(figures["imbalance"], "{:.2f}"),
        _known(figures["uneven"], "{:.1%}"),
        _known(figures["waits"], "{:.1%}"),
        _known(figures["bytes"], "{:.1f} MB", 1e-6),
        f"{figures['peak_memory'] / 1e6:,.0f} MB",
        f"{figures['loss_difference']:.0e}",
    )
    return f"| {' | '.join(cells)} |"


def _known(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def _draw(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Panels with a bar for each run and way: time of a step, what ranks idle, peak of memory."""
    from matplotlib.patches import Patch

    figure = pictures.new_figure(max(5.0, 1.6 * len(found)), 8.4)
    panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("milliseconds of a step", lambda way: 1e3 * statistics.median(way["seconds"])),
        ("% idle, attention uneven", lambda way: 100 * (way["uneven"] or 0.0)),
        ("% waits in attention", lambda way: 100 * (way["waits"] or 0.0)),
        ("MB, peak of a rank", lambda way: way["peak_memory"] / 1e6),
    ]
    width = 0.84 / len(WAYS)
    for axes, (label, value) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for number, (way, about) in enumerate(WAYS.items()):
            left = width * (number - (len(WAYS) - 1) / 2)
            values = [value(result["ways"][way]) for result in found.values()]
            axes.bar([place + left for place in range(len(found))], values, width=0.92 * width, color=about.colour)
        axes.set_ylabel(label, fontsize=8)
        pictures.plain(axes, grid=True)
    axes.set_xticks(range(len(found)), [name.replace("-", "\n") for name in found], fontsize=7)
    pictures.legend_below(figure, [Patch(color=about.colour, label=way) for way, about in WAYS.items()], columns=2)
    pictures.save(figure, path)


if __name__ == "__main__":
    try:
        print(write_table(Path(sys.argv[1])), end="")
    except DistcaError as error:
        sys.exit(f"error: {error}")
