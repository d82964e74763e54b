"""What the benchmarks share: timing in alternation, and a result with everything needed to run it again."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import distca

Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table: a figure, its unit, and the bounds it should keep to (None: no bound)."""

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


def write_report(results: Sequence[Result], folder: Path) -> Path:
    """Each result as JSON, and all of them as ``<machine>.md``, which is returned."""
    for result in results:
        result.write(folder / f"{result.benchmark}.json")
    facts = setting()
    head = [f"# {facts['cpu']}, {facts['cores']} cores", "", "Ratios are medians of times taken in alternation.", ""]
    head += [f"- {name}: {value}" for name, value in facts.items() if name not in ("cpu", "cores")]
    path = folder / (re.sub(r"[^a-z0-9]+", "-", f"{facts['cpu']} {facts['cores']} cores".lower()).strip("-") + ".md")
    path.write_text("\n".join([*head, "", *(result.markdown() for result in results)]))
    return path


def in_turn(*works: Work) -> Work:
    """All of them, one after another."""

    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


def seconds(work: Work) -> float:
    """Time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternate(works: Sequence[Work], rounds: int, timer: Callable[[Work], float] = seconds) -> list[list[float]]:
    """Times of each of `works`, called in turn, every other round in reverse; the first round is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for round_number in range(rounds + 1):
        order = range(len(works)) if round_number % 2 else reversed(range(len(works)))
        for i in order:
            taken = timer(works[i])
            if round_number > 0:
                times[i].append(taken)
    return times


def median_ratio(times: Sequence[float], peers: Sequence[float]) -> float:
    """Median over rounds of time / peer's time in the same round."""
    return statistics.median(a / b for a, b in zip(times, peers, strict=True))


def spread(times: Sequence[float]) -> float:
    """Distance of the quartiles over the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def setting() -> dict[str, Any]:
    """Command, hardware and versions."""
    gpu = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "gpu_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return {
        **gpu,
        "command": " ".join(["distca", *sys.argv[1:]]),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_kernel": distca._C.cpu_isa(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
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
