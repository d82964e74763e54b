"""The result of a benchmark: its figures, with everything needed to run it again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distca.apps.common.machine import setting
from distca.errors import InvalidArgumentError


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table: a figure, its unit, and the bounds that it should keep to (None: no bound)."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def wanted(self) -> str:
        """The bound in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"


@dataclass
class Result:
    """A benchmark's figures with the hardware, the versions and the command that gave them."""

    benchmark: str
    rows: list[Row]
    details: dict[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """The rows as text."""
        width = max(len(row.name) for row in self.rows)
        lines = [f"distca bench {self.benchmark}"]
        for row in self.rows:
            wanted = f"  ({row.wanted} wanted)" if row.wanted else ""
            lines.append(f"  {row.name:<{width}}  {row.value:10.5g} {row.unit}{wanted}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """The rows as a table in Markdown."""
        lines = [f"## {self.benchmark}", "", "| | figure | wanted |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.value:.5g} {row.unit} | {row.wanted} |" for row in self.rows]
        return "\n".join([*lines, "", f"`{json.dumps(self.details)}`", ""])

    @property
    def content(self) -> dict[str, Any]:
        """What is written as JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"benchmark": self.benchmark, "rows": rows, "details": self.details, **setting()}

    def write(self, path: Path) -> None:
        """Writes everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content, indent=2) + "\n")


def read_result(path: Path, benchmark: str) -> dict[str, Any]:
    """The content of a file that `Result.write` wrote for a benchmark.

    Raises:
        InvalidArgumentError: it cannot be read, or is of something else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("benchmark") != benchmark:
        raise InvalidArgumentError(f"{path} has no figures of bench {benchmark}; a file of its --json is expected")
    return content


def write_report(results: Sequence[Result], folder: Path) -> Path:
    """Writes each result as JSON, and all of them as ``<machine>.md``. Returns the path of the latter."""
    for result in results:
        result.write(folder / f"{result.benchmark}.json")
    facts = setting()
    head = [
        f"# {facts['cpu']}, {facts['cores']} cores",
        "",
        "Ratios compare times that are taken in turns in one run.",
        "",
    ]
    head += [f"- {name}: {value}" for name, value in facts.items() if name not in ("cpu", "cores")]
    path = folder / (re.sub(r"[^a-z0-9]+", "-", f"{facts['cpu']} {facts['cores']} cores".lower()).strip("-") + ".md")
    path.write_text("\n".join([*head, "", *(result.markdown() for result in results)]))
    return path
