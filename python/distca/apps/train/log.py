"""The folder of a run: configuration, `metrics.jsonl` and TensorBoard events, then `summary.json` and the report."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from distca.apps.common.corpus import Corpus
from distca.apps.common.files import as_json, writing
from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig
from distca.apps.train.metrics import AttentionLoads, StepMetrics, summarise
from distca.apps.train.report import add_timeline, missing_packages, write_report
from distca.apps.train.tracking import Tracker
from distca.trace.timeline import after_warm_up, figures, windows
from distca.trace.trace import Trace

CONFIG, METRICS = "config.json", "metrics.jsonl"

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def create_run_dir(config: TrainConfig) -> Path:
    """Makes a new folder for the run: its name, or the name with the first free number from 2 on."""
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
    """Writes the files of a run as it goes. Without a folder, as on ranks other than 0, it only counts."""

    def __init__(self, config: TrainConfig, run_dir: Path | None, corpus: Corpus, *, start: int = 0) -> None:
        """A run that is resumed at step `start` keeps the metrics of the steps before it."""
        self._config, self._run_dir, self._corpus = config, run_dir, corpus
        self._start = start
        self._steps: list[StepMetrics] = []
        self._last: AttentionLoads | None = None
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._tracker: Tracker | None = None

    def __enter__(self) -> RunLog:
        if self._run_dir is not None:
            path = self._run_dir / METRICS
            self._steps = steps_before(self._start, path)
            with writing(self._run_dir):
                _write(self._run_dir / CONFIG, _json(self._config.as_json()))
                _write(path, "".join(metrics.to_json() + "\n" for metrics in self._steps))
                self._file = open(path, "a", encoding="utf-8")
                self._board = _open_board(self._run_dir / "tensorboard", self._start)
                if self._config.track is not None:
                    self._tracker = Tracker(self._config, self._run_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run_dir is None:
            return
        # Files that could not be written before are tried once more here. The first error is the one to report.
        with contextlib.suppress(OSError) if error is not None else writing(self._run_dir):
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()
            if self._tracker is not None:
                self._tracker.close(failed=error is not None)

    def step(self, metrics: StepMetrics, loads: AttentionLoads) -> None:
        self._steps.append(metrics)
        self._last = loads
        if self._run_dir is None:
            return
        with writing(self._run_dir):
            if self._file is not None:
                self._file.write(metrics.to_json() + "\n")
                self._file.flush()
            if self._board is not None:
                for name, value in metrics.scalars().items():
                    self._board.add_scalar(name, value, metrics.step)
            if self._tracker is not None:
                self._tracker.step(metrics.step, metrics.scalars())

    def finish(
        self,
        interrupted: bool,
        attention: str,
        notes: Sequence[str] = (),
        traces: Sequence[Trace] = (),
        more: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes summary and report, and returns the summary.

        `attention` is what the context computes it with. `traces` are those of all ranks, if there are any. `more`
        are further paragraphs of the report.
        """
        traced = figures(traces, after_warm_up(windows(traces))) if traces else None
        summary = {
            "run": str(self._run_dir),
            "interrupted": interrupted,
            **summarise(self._steps),
            "documents": len(self._corpus),
            f"{self._corpus.unit}_skipped": self._corpus.num_skipped,
            "notes": [*notes, *missing_packages()],
        }
        if traced is not None:
            summary["trace"] = traced.as_json()
        if self._run_dir is not None:
            assert self._last is not None  # no run ends before its first step
            with writing(self._run_dir):
                write_report(self._run_dir, self._config, summary, self._steps, self._last, attention, more)
                if traced is not None:
                    add_timeline(self._run_dir, traces, traced)
                _write(self._run_dir / "summary.json", _json(summary))
        return summary


def _open_board(folder: Path, start: int) -> SummaryWriter | None:
    """A writer of TensorBoard events; None without the package. It marks events of steps that a kill has undone."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=start)


def steps_before(start: int, path: Path) -> list[StepMetrics]:
    """The metrics of the steps before `start`, if there are any. Raises ConfigError for a line that is not a step.

    A kill may have cut off the last line, which is of a later step.
    """
    if start == 0 or not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(StepMetrics.from_json(line.decode()))
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(lines):
                raise ConfigError(
                    f"{path}, line {number}, is not a step of a run ({error}): remove the line or the file, and the "
                    "run goes on without what it says"
                ) from error
    return [metrics for metrics in found if metrics.step < start]


def _json(content: dict[str, Any]) -> str:
    return as_json(content, indent=2) + "\n"


def _write(path: Path, content: str) -> None:
    """Writes all or nothing: a kill leaves the file as it was."""
    new = path.with_name(path.name + ".new")
    new.write_text(content, encoding="utf-8")
    new.replace(path)
