"""What the benchmarks share: timing in alternation, and a result with everything needed to run it again."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import distca


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table: a figure, its unit, and what it should be at most (None: no target)."""

    name: str
    value: float
    unit: str
    at_most: float | None = None


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
            target = "" if row.at_most is None else f"  (at most {row.at_most:g} wanted)"
            lines.append(f"  {row.name:<{width}}  {row.value:10.5g} {row.unit}{target}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.benchmark,
            "rows": [asdict(row) for row in self.rows],
            "details": self.details,
            **setting(),
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


def seconds(work: Callable[[], object]) -> float:
    """Time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternate(works: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Times of each of `works`, called in turn, every other round in reverse; the first round is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for round_number in range(rounds + 1):
        order = range(len(works)) if round_number % 2 else reversed(range(len(works)))
        for i in order:
            taken = seconds(works[i])
            if round_number > 0:
                times[i].append(taken)
    return times


def median_ratio(times: Sequence[float], peers: Sequence[float]) -> float:
    """Median over rounds of time / peer's time in the same round."""
    return statistics.median(a / b for a, b in zip(times, peers, strict=True))


def setting() -> dict[str, Any]:
    """Command, hardware and versions."""
    return {
        "command": " ".join(["distca", *sys.argv[1:]]),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distca": distca.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
