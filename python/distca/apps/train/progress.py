"""What `distca train` shows while it runs: a bar on a terminal, otherwise a line of log every few seconds."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from distca.apps.train.metrics import StepMetrics

LOG_SECONDS = 5.0
"""The least time between two logged lines; the first and the last step are always logged."""

WIDTH = 80
_log = logging.getLogger("distca")


class _ToStderr(logging.Handler):
    """Writes lines to stderr, above the bar if there is one. A line that cannot be written ends no run."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the disk is full, or the reader of a pipe or a terminal is gone
            tqdm.write(self.format(record), file=sys.stderr)


def log_to_stderr(rank: int) -> None:
    """Sends lines of the logger `distca` to stderr: every rank's warnings, and all lines of rank 0 without a bar."""
    handler = next((handler for handler in _log.handlers if isinstance(handler, _ToStderr)), None)
    _lock_in_process()
    if handler is None:
        handler = _ToStderr()
        _log.addHandler(handler)
    handler.setFormatter(logging.Formatter("%(asctime)s distca: %(message)s", datefmt="%H:%M:%S"))
    _log.setLevel(logging.INFO if rank == 0 and not sys.stderr.isatty() else logging.WARNING)


def _lock_in_process() -> None:
    """Gives tqdm a lock of this process. Its own is shared between processes: a killed one would leave it locked."""
    tqdm.set_lock(threading.RLock())


class Progress:
    """Shows each step of a run, if this rank `shows` it. Use it as a context manager.

    Args:
        steps: steps of the whole run.
        start: the first step that this process takes.
        shows: whether this rank shows anything.
        clock: returns seconds.
    """

    def __init__(self, steps: int, start: int, shows: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._start, self._shows, self._clock = steps, start, shows, clock
        self._bar: tqdm | None = None
        self._first_over = self._last_line = 0.0
        self._tokens, self._seconds = 0, 0.0  # since the last line

    def __enter__(self) -> Progress:
        if self._shows and sys.stderr.isatty():
            _lock_in_process()
            size = shutil.get_terminal_size()  # works even if the terminal does not know its size
            self._bar = tqdm(
                total=self._steps,
                initial=self._start,
                ncols=min(WIDTH, size.columns),
                nrows=size.lines,
                bar_format="{n_fmt}/{total_fmt} {bar} {desc}{remaining} left",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, metrics: StepMetrics, *, interrupted: bool = False) -> None:
        """Shows a step that was taken."""
        if self._bar is not None:
            rate = tqdm.format_sizeof(metrics.tokens / metrics.seconds)
            loads = f"{metrics.imbalance_before:.2f} -> {metrics.imbalance_after:.2f}"
            self._bar.set_description_str(f"loss {metrics.loss:.3f}, {rate} tok/s, imbalance {loads}, ", refresh=False)
            self._bar.update()
        elif self._shows:
            self._log_step(metrics, interrupted)

    def _log_step(self, metrics: StepMetrics, interrupted: bool) -> None:
        now, taken = self._clock(), metrics.step + 1
        self._tokens += metrics.tokens
        self._seconds += metrics.seconds
        first, last = metrics.step == self._start, taken == self._steps or interrupted
        if first:
            self._first_over = now
        if not (first or last) and now - self._last_line < LOG_SECONDS:
            return
        _log.info(
            "step %d/%d, loss %.3f, %s tokens/s, imbalance %.2f -> %.2f, %s left",
            taken,
            self._steps,
            metrics.loss,
            f"{self._tokens / self._seconds:,.0f}",
            metrics.imbalance_before,
            metrics.imbalance_after,
            tqdm.format_interval(self._left(metrics, now)),
        )
        self._last_line, self._tokens, self._seconds = now, 0, 0.0

    def _left(self, metrics: StepMetrics, now: float) -> float:
        """Seconds for the remaining steps, at the pace of the steps after the first, which has one-time costs."""
        after_first = metrics.step - self._start
        seconds = (now - self._first_over) / after_first if after_first else metrics.seconds
        return seconds * (self._steps - metrics.step - 1)
