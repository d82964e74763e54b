"""What a run records: one line of `metrics.jsonl` a step, `config.json`, and the summary at its end."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from distca.planning import Layout, Plans
from distca.train.config import ConfigError, TrainConfig
from distca.train.data import Corpus

_ENDS = 5  # steps at either end over which the loss is averaged


@dataclass(frozen=True)
class AttentionLoads:
    """The attention of one step, all layers added up: load of each rank in units of the cost model, and traffic."""

    before: list[int]  # every row computed at home
    after: list[int]  # as planned
    bytes: int  # moved between ranks, forward and backward
    plan_ms: float  # planning the step on one rank

    @staticmethod
    def of(plans: Plans, windows: Sequence[int | None]) -> AttentionLoads:
        """`windows`: of each layer."""
        stats = [plans.for_window(window).stats for window in windows]
        return AttentionLoads(
            before=[sum(loads) for loads in zip(*(layer.load_before for layer in stats), strict=True)],
            after=[sum(loads) for loads in zip(*(layer.load for layer in stats), strict=True)],
            bytes=sum(sum(layer.bytes.values()) for layer in stats),
            plan_ms=sum(plan.stats.plan_ms for plan in plans.values()),
        )


@dataclass(frozen=True)
class Unbalanced:
    """The same step with every row computed at home, beside the balanced one."""

    seconds: float
    loss_difference: float  # relative
    gradient_difference: float  # of the gradient's norm, relative


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step."""

    loss: float  # mean over all targets of all ranks
    interrupted: bool  # whether any rank was asked to stop
    seconds: float  # on this rank, since the end of the step before
    unbalanced: Unbalanced | None = None


@dataclass(frozen=True)
class StepMetrics:
    """One step of all ranks."""

    step: int
    loss: float  # mean over all targets of all ranks
    tokens: int  # of all ranks
    seconds: float  # on rank 0, the wait for the plan included
    imbalance_before: float  # largest attention load over the mean, every row computed at home
    imbalance_after: float  # the same, as planned
    bytes: int  # moved between ranks, forward and backward, all layers
    plan_ms: float  # planning one step on one rank
    unbalanced: Unbalanced | None = None  # where the run compares

    @staticmethod
    def of(step: int, result: StepResult, layout: Layout, loads: AttentionLoads) -> StepMetrics:
        return StepMetrics(
            step=step,
            loss=result.loss,
            tokens=sum(layout.num_rows(rank) for rank in range(layout.num_ranks)),
            seconds=result.seconds,
            imbalance_before=_imbalance(loads.before),
            imbalance_after=_imbalance(loads.after),
            bytes=loads.bytes,
            plan_ms=loads.plan_ms,
            unbalanced=result.unbalanced,
        )

    @staticmethod
    def from_json(line: str) -> StepMetrics:
        values = json.loads(line)
        if "unbalanced" in values:
            values["unbalanced"] = Unbalanced(**values["unbalanced"])
        return StepMetrics(**values)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    def line(self) -> str:
        """For the progress bar."""
        return (
            f"loss {self.loss:.3f}, {self.tokens / self.seconds:,.0f} tokens/s, "
            f"imbalance {self.imbalance_before:.2f} -> {self.imbalance_after:.2f}, "
            f"{self.bytes / 1e6:.1f} MB moved, plan {self.plan_ms:.2f} ms"
        )


def create_run_dir(config: TrainConfig) -> Path:
    """A new folder for the run: its name, or the name and the first free number from 2 on."""
    number = 1
    while True:
        run_dir = config.runs_dir / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"--runs-dir is {config.runs_dir}, where no folder can be made: {error}") from error


class RunLog:
    """Writes the files of a run as it goes; without a folder (ranks other than 0) it only counts."""

    def __init__(self, config: TrainConfig, run_dir: Path | None, corpus: Corpus, *, start: int = 0) -> None:
        """A run that is resumed at step `start` keeps its metrics of the steps before."""
        self._config, self._run_dir, self._corpus = config, run_dir, corpus
        self._start = start
        self._steps: list[StepMetrics] = []
        self._file: TextIO | None = None

    def __enter__(self) -> RunLog:
        if self._run_dir is not None:
            _write(self._run_dir / "config.json", _json(self._config.as_json()))
            path = self._run_dir / "metrics.jsonl"
            self._steps = _steps_before(self._start, path)
            _write(path, "".join(metrics.to_json() + "\n" for metrics in self._steps))
            self._file = open(path, "a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        if self._file is not None:
            self._file.write(metrics.to_json() + "\n")
            self._file.flush()

    def finish(self, interrupted: bool) -> dict[str, Any]:
        summary = {
            "run": str(self._run_dir),
            "interrupted": interrupted,
            **summarise(self._steps),
            "documents": len(self._corpus.documents),
            "files_skipped": self._corpus.num_skipped,
        }
        if self._run_dir is not None:
            _write(self._run_dir / "summary.json", _json(summary))
        return summary


def summarise(steps: list[StepMetrics]) -> dict[str, Any]:
    """Means over all steps of the run, those before a resume included.

    The loss at the start and the end is the mean of up to five steps there.
    """
    num_steps = len(steps)
    # The first step carries one-time costs; where there are others, the rate is theirs.
    timed = steps[1:] or steps
    loss_first = sum(step.loss for step in steps[:_ENDS]) / len(steps[:_ENDS])
    loss_last = sum(step.loss for step in steps[-_ENDS:]) / len(steps[-_ENDS:])
    summary: dict[str, Any] = {
        "steps": num_steps,
        "loss_first": loss_first,
        "loss_last": loss_last,
        "loss_ratio": loss_last / loss_first,
        "seconds": sum(step.seconds for step in steps),
        "tokens_per_second": sum(step.tokens for step in timed) / sum(step.seconds for step in timed),
        "imbalance_before": sum(step.imbalance_before for step in steps) / num_steps,
        "imbalance_after": sum(step.imbalance_after for step in steps) / num_steps,
        "bytes_per_step": sum(step.bytes for step in steps) / num_steps,
        "plan_ms": sum(step.plan_ms for step in steps) / num_steps,
    }
    compared = [(step.seconds, step.unbalanced) for step in timed if step.unbalanced is not None]
    if compared:
        summary["compare"] = {
            "steps": len(compared),
            "seconds_balanced": statistics.median(seconds for seconds, _ in compared),
            "seconds_unbalanced": statistics.median(other.seconds for _, other in compared),
            "ratio": statistics.median(seconds / other.seconds for seconds, other in compared),
            "loss_difference": max(other.loss_difference for _, other in compared),
            "gradient_difference": max(other.gradient_difference for _, other in compared),
        }
    return summary


def _imbalance(loads: list[int]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def describe(summary: dict[str, Any]) -> str:
    """The summary for people."""
    how = "stopped" if summary["interrupted"] else "finished"
    rate = f"{summary['tokens_per_second']:,.0f} tokens/s"
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    lines = [
        f"{how} after {summary['steps']} steps, {summary['seconds']:.1f} s, {rate}",
        f"loss       {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}, ratio {summary['loss_ratio']:.2f} "
        f"(means of the first and last {_ENDS} steps)",
        f"imbalance  {before:.2f} -> {after:.2f} (largest attention load over the mean)",
        f"moved      {summary['bytes_per_step'] / 1e6:.1f} MB a step, planned in {summary['plan_ms']:.2f} ms",
        f"documents  {summary['documents']}, files skipped as they are not UTF-8 text: {summary['files_skipped']}",
    ]
    if (compare := summary.get("compare")) is not None:
        lines += [
            f"step time  {compare['seconds_balanced']:.3f} s balanced, {compare['seconds_unbalanced']:.3f} s not "
            f"(medians of {compare['steps']} pairs), ratio {compare['ratio']:.3f} (median of the pairs' ratios)",
            f"           the same loss to {compare['loss_difference']:.1e}, the same gradient norm to "
            f"{compare['gradient_difference']:.1e} (largest relative differences)",
        ]
    lines.append(f"written to {summary['run']}")
    if summary["interrupted"]:
        lines.append(f"go on with: distca train --resume {summary['run']}")
    return "\n".join(lines)


def _steps_before(start: int, path: Path) -> list[StepMetrics]:
    """What an earlier part of the run has recorded; a line that a kill has cut off is of a later step."""
    if start == 0 or not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(StepMetrics.from_json(line))
    return [metrics for metrics in found if metrics.step < start]


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write(path: Path, content: str) -> None:
    """All or nothing: a kill leaves the file as it was."""
    new = path.with_name(path.name + ".new")
    new.write_text(content, encoding="utf-8")
    new.replace(path)
