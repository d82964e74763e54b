"""The table and the picture of a sweep: `python -m distca.apps.pretrain.table FOLDER`."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from distca.apps.common import pictures
from distca.errors import DistcaError

RESULT = "compare.json"
#: What is compared, and the options that make it.
WAYS: dict[str, dict[str, Any]] = {
    "distca": {"attention": "distca"},
    "unbalanced": {"attention": "distca", "balance": False},
    "megatron": {"attention": "megatron"},
}
_COLOURS = (pictures.PLANNED, pictures.AT_HOME, pictures.INK)


def write_table(folder: Path) -> str:
    """Writes `table.md`, `results.jsonl` and `times.png` of the runs in a folder. Returns the table.

    Raises:
        DistcaError: there is no run in it.
    """
    found = {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob(f"*/{RESULT}"))}
    if not found:
        raise DistcaError(f"{folder} has no run with a {RESULT}")
    (folder / "results.jsonl").write_text("".join(json.dumps({"run": n} | r) + "\n" for n, r in found.items()))
    of_first = next(iter(found.values()))["setting"]
    where = of_first.get("gpu") or f"{of_first['cpu']}, {of_first['cores']} cores"
    lines = [
        f"{where}; distca {of_first['distca']}, torch {of_first['torch']}, megatron-core {of_first['megatron']}",
        "",
        "| run | time / without balance | time / Megatron | imbalance | attention idle | moved | losses equal to |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, result) for name, result in found.items()),
        "",
        "Times are of steps with distca, over those of the same round; medians, with the spread of its own times "
        "(distance of the quartiles over the median). Imbalance is the largest attention load over the mean, before "
        "and after balance. The idle share of attention is what the other ranks then wait: 1 - 1 / imbalance.",
    ]
    if of_first.get("gpu") is None:
        lines.append("On CPU ranks Megatron's attention is PyTorch's, one document after the other.")
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        _draw(folder / "times.png", found)
    return text


def _row(name: str, result: dict[str, Any]) -> str:
    before, after = result["imbalance_before"], result["imbalance_after"]
    ratio, spread = result["ratio"], result["spread"]["distca"]
    return (
        f"| {name} | {ratio['unbalanced']:.3f} (spread {spread:.2f}) | {ratio['megatron']:.3f} | {before:.2f} -> "
        f"{after:.2f} | {1 - 1 / before:.0%} -> {1 - 1 / after:.0%} | {result['bytes'] / 1e6:.1f} MB | "
        f"{max(result['loss_difference'].values()):.0e} |"
    )


def _draw(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """A bar of seconds for each run and way."""
    from matplotlib.patches import Patch

    figure = pictures.new_figure(max(5.0, 1.2 * len(found)), 3.6)
    axes = figure.add_subplot()
    for number, (way, colour) in enumerate(zip(WAYS, _COLOURS, strict=True)):
        medians = [statistics.median(result["seconds"][way]) for result in found.values()]
        axes.bar([place + 0.27 * (number - 1) for place in range(len(found))], medians, width=0.25, color=colour)
    axes.set_xticks(range(len(found)), [name.replace("-", "\n", 1) for name in found], fontsize=7)
    axes.set_ylabel("seconds of a step")
    pictures.plain(axes, grid=True)
    keys = [Patch(color=colour, label=way) for way, colour in zip(WAYS, _COLOURS, strict=True)]
    pictures.legend_below(figure, keys)
    pictures.save(figure, path)


if __name__ == "__main__":
    try:
        print(write_table(Path(sys.argv[1])), end="")
    except DistcaError as error:
        sys.exit(f"error: {error}")
