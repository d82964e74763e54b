"""What `distca train` shows while it runs: a bar that fits the terminal, or lines of log."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from distca.apps.train.config import TrainConfig
from distca.apps.train.metrics import Compared, StepMetrics, describe, summarise
from distca.apps.train.progress import LOG_SECONDS, Progress, log_to_stderr
from distca.apps.train.report import options_in_full


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The library's logger, which is restored afterwards."""
    log = logging.getLogger("distca")
    handlers, level = list(log.handlers), log.level
    yield log
    log.handlers[:] = handlers
    log.setLevel(level)


def _metrics(step: int, **changed: Any) -> StepMetrics:
    figures = {"loss": 4.25, "tokens": 1000, "seconds": 0.5, "imbalance_before": 1.5, "imbalance_after": 1.02}
    return StepMetrics(step=step, bytes=0, plan_ms=0.1, **(figures | changed))


@pytest.mark.parametrize(
    ("steps", "changed"),
    [
        (10, {}),
        (100000, {"loss": 11.762, "tokens": 9_876_543, "seconds": 1.0, "imbalance_before": 7.62}),
    ],
)
def test_the_bar_fits_80_columns_with_all_that_it_says(
    steps: int, changed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with Progress(steps, steps - 3, shows=True) as progress:
        for step in range(steps - 3, steps):
            progress.step(_metrics(step, **changed))
    lines = [line.strip("\n") for line in terminal.getvalue().split("\r")]
    assert max(map(len, lines)) <= 80
    last = lines[-1]
    assert (
        last.startswith(f"{steps}/{steps} ") and last.endswith("00:00 left") and "imbalance" in last and "tok/s" in last
    )
    assert f"loss {changed.get('loss', 4.25):.3f}" in last


def test_without_a_terminal_there_is_a_line_for_the_first_and_the_last_step_and_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    now = 100.0
    for _ in range(2):  # this is set up twice, as in a process that trains twice
        log_to_stderr(rank=0)
    with Progress(40, 10, shows=True, clock=lambda: now) as progress:
        for step in range(10, 40):
            now += 1.0
            progress.step(_metrics(step, seconds=1.0))
    lines = err.getvalue().splitlines()
    every = int(LOG_SECONDS)
    assert "\r" not in err.getvalue()
    assert [int(re.search(r"step (\d+)/40,", line)[1]) for line in lines] == [*range(11, 40, every), 40]
    line = lines[1]
    assert re.fullmatch(r"\d\d:\d\d:\d\d distca: step 16/40, .*", line)
    assert line.endswith("loss 4.250, 1,000 tokens/s, imbalance 1.50 -> 1.02, 00:24 left")
    assert lines[-1].endswith("00:00 left")


def test_the_last_line_of_an_interrupted_run_is_its_last_step(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    log_to_stderr(rank=0)
    with Progress(40, 0, shows=True, clock=lambda: 0.0) as progress:
        for step in range(3):
            progress.step(_metrics(step), interrupted=step == 2)
    assert re.findall(r"step (\d+)/40", err.getvalue()) == ["1", "3"]


@pytest.mark.parametrize(("bar", "number"), [(False, errno.ENOSPC), (False, errno.EPIPE), (True, errno.EIO)])
def test_what_cannot_be_shown_ends_no_run(
    bar: bool, number: int, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return bar

        def write(self, text: str) -> int:
            raise OSError(number, "gone")

    monkeypatch.setattr("sys.stderr", Gone())
    log_to_stderr(rank=0)
    with Progress(2, 0, shows=True) as progress:
        logger.warning("a line")
        for step in range(2):
            progress.step(_metrics(step))


def test_other_ranks_show_nothing_but_warnings(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    log_to_stderr(rank=1)
    with Progress(2, 0, shows=False) as progress:
        progress.step(_metrics(0))
    logger.info("not shown")
    logger.warning("shown")
    assert err.getvalue().endswith("distca: shown\n") and err.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0], "4.000 -> 4.000, ratio 1.00 (first and last step)"),
        ([4.0, 3.0, 2.0], "4.000 -> 2.000, ratio 0.50 (first and last step)"),
        ([8.0, 6.0, 5.0, 4.0], "7.000 -> 4.500, ratio 0.64 (means of the first and last 2 steps)"),
        ([4.0] * 6 + [2.0] * 6, "4.000 -> 2.000, ratio 0.50 (means of the first and last 5 steps)"),
    ],
)
def test_the_losses_at_both_ends_of_a_short_run_share_no_step(losses: list[float], said: str) -> None:
    summary = summarise([_metrics(number, loss=loss) for number, loss in enumerate(losses)])
    text = describe(summary | {"interrupted": False, "documents": 1, "files_skipped": 0, "run": "runs/a", "notes": []})
    assert f"loss       {said}\n" in text


def test_first_steps_without_a_target_have_no_loss_to_compare_with() -> None:
    assert math.isnan(summarise([_metrics(0, loss=0.0), _metrics(1)])["loss_ratio"])


def test_an_evaluation_is_told_with_the_number_of_steps_before_it() -> None:
    summary = summarise([_metrics(0), _metrics(1, eval_loss=3.5), _metrics(2)])
    text = describe(summary | {"interrupted": False, "documents": 1, "files_skipped": 0, "run": "runs/a", "notes": []})
    assert "evaluated  3.500 after step 2\n" in text


def test_a_figure_that_is_not_finite_is_null_in_json_and_stays_null() -> None:
    step = _metrics(0, grad_norm=math.inf, unbalanced=Compared(0.5, math.nan, 0.0))
    written = json.loads(step.to_json(), parse_constant=pytest.fail)
    assert (written["loss"], written["grad_norm"]) == (4.25, None)
    assert written["unbalanced"] == {"seconds": 0.5, "loss_difference": None, "gradient_difference": 0.0}
    again = StepMetrics.from_json(step.to_json())
    assert again.loss == 4.25 and math.isnan(again.grad_norm) and math.isnan(again.unbalanced.loss_difference)
    assert again.to_json() == step.to_json()


def test_a_report_says_the_values_of_options_that_were_left_out() -> None:
    assert options_in_full(TrainConfig())["--warmup-steps"] == "5"
    assert options_in_full(TrainConfig(schedule="constant"))["--warmup-steps"] == "none"
    found = [options_in_full(TrainConfig(ranks=4, pipeline=stages))["--accumulate"] for stages in (1, 2)]
    assert found == ["1", "4"]
