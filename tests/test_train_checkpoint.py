"""Checkpoints of `distca train`: resuming to the bit, kills while one is written, and what may change on the way."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distca
from distca.cli import main
from distca.train.checkpoint import FOLDER, whole_checkpoints
from distca.train.cli import train_rank
from distca.train.config import ConfigError, TrainConfig
from distca.train.data import DataError
from distca.train.log import create_run_dir
from distca.train.metrics import StepResult
from distca.train.resume import find_run, resumed_config
from distca.train.step import train_step
from distca.train.trainer import train
from train_runs import one_rank

SMALL = TrainConfig(steps=6, tokens_per_rank=96, hidden=32, layers=1, checkpoint_every=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (20 if number % 6 == 0 else 1 + number // 2)
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _losses(run_dir: Path) -> list[float]:
    metrics = _metrics(run_dir)
    assert [step["step"] for step in metrics] == list(range(len(metrics)))
    return [step["loss"] for step in metrics]


def _back_to(run_dir: Path, step: int, *, source: Path) -> Path:
    """A copy of a run as if it had been killed some time after the checkpoint of that step."""
    shutil.copytree(source, run_dir)
    for taken, folder in whole_checkpoints(run_dir).items():
        if taken > step:
            shutil.rmtree(folder)
    (run_dir / "summary.json").unlink()
    return run_dir


def _whole_and_resumed(whole: TrainConfig, runs: Path) -> None:
    """On two ranks: `whole` without interruption, and two copies of it that were killed and go on."""
    train(whole, runs / "whole")
    if dist.get_rank() == 0:
        early, late = (_back_to(runs / name, step, source=runs / "whole") for name, step in (("early", 2), ("late", 4)))
        (early / FOLDER / "step-00000004.partial").mkdir()
        (early / FOLDER / "step-00000004.partial" / "__0_0.distcp").write_bytes(b"half")
        (early / FOLDER / "step-00000000.removed").mkdir()
        with open(late / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "los')  # cut off by the kill
    dist.barrier()
    for name in ("early", "late"):
        train(resumed_config(runs / name, {}), runs / name)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    (runs / "whole").mkdir()
    distca.launch(_whole_and_resumed, replace(SMALL, data=data, keep_checkpoints=3), runs, ranks=2, threads=1)
    return runs


@pytest.fixture
def whole(runs: Path) -> Path:
    """A run of 6 steps on two ranks, its checkpoints after 2, 4 and 6 steps kept."""
    assert list(whole_checkpoints(runs / "whole")) == [2, 4, 6]
    return runs / "whole"


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once(name: str, runs: Path) -> None:
    assert _losses(runs / name) == _losses(runs / "whole")
    resumed, whole = (json.loads((runs / run / "summary.json").read_text()) for run in (name, "whole"))
    assert (resumed["steps"], resumed["interrupted"], resumed["loss_last"]) == (6, False, whole["loss_last"])
    kept = sorted(path.name for path in (runs / name / FOLDER).iterdir())
    assert kept == [f"step-{step:08}" for step in (2, 4, 6)]


def test_resuming_on_more_ranks_with_the_same_tokens_a_step_gives_the_same_losses(whole: Path, tmp_path: Path) -> None:
    run_dir = _back_to(tmp_path / "run", 2, source=whole)
    config = resumed_config(run_dir, {"ranks": 3, "tokens_per_rank": 64})
    distca.launch(train_rank, config, run_dir, ranks=3, threads=1)
    assert _losses(run_dir) == pytest.approx(_losses(whole), rel=1e-6)


@pytest.mark.parametrize(("every", "kept"), [(1, [5, 6]), (0, [6])])
def test_only_the_last_checkpoints_are_kept(every: int, kept: list[int], data: Path, tmp_path: Path) -> None:
    config = replace(SMALL, data=data, runs_dir=tmp_path, checkpoint_every=every)
    run_dir = create_run_dir(config)
    with one_rank():
        train(config, run_dir)
    assert list(whole_checkpoints(run_dir)) == kept


def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, one_rank():
        patch.setattr(os, "fsync", full)
        with pytest.raises(distca.DistcaError, match="could not write the checkpoint .*step-00000002.*No space left"):
            train(replace(SMALL, data=data), run_dir)
    assert not whole_checkpoints(run_dir)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 1.0}, "--lr is 1.0, the run RUN has 0.003: leave it out, or start a new run"),
        ({"hidden": 64}, "--hidden is 64, the run RUN has 32"),
        ({"seed": 3}, "--seed is 3, the run RUN has 0"),
        ({"ranks": 3}, "--ranks 3 times --tokens-per-rank 96 are 288 tokens a step, must be the run's 192; with "
         "--ranks 3 that is --tokens-per-rank 64"),
        ({"name": "other"}, "--name is other, but a resumed run goes on in its folder"),
        ({"steps": 6}, "--steps is 6, must be above the 6 steps that RUN has taken"),
    ],
)  # fmt: skip
def test_an_option_that_a_resumed_run_must_keep_is_refused_by_name(given: dict, message: str, whole: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("RUN", str(whole)))):
        resumed_config(whole, given)


def test_what_does_not_decide_the_steps_may_change_and_steps_may_be_added(whole: Path) -> None:
    given = {"steps": 9, "balance": "off", "timeout": 5.0, "checkpoint_every": 1, "ranks": 1, "tokens_per_rank": 192}
    config = resumed_config(whole, given)
    assert {name: getattr(config, name) for name in given} == given
    assert (config.hidden, config.seed, config.data) == (32, 0, resumed_config(whole, {"steps": 7}).data)


def test_other_documents_than_the_run_had_are_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other").write_text("other text " * 50)
    run_dir = _back_to(tmp_path / "run", 4, source=whole)
    config = resumed_config(run_dir, {"data": tmp_path / "data", "ranks": 1, "tokens_per_rank": 192})
    with one_rank(), pytest.raises(DataError, match="the documents are not those of the checkpoint"):
        train(config, run_dir)


def test_resume_finds_the_run_by_its_folder_or_the_newest_checkpoint(whole: Path, tmp_path: Path) -> None:
    assert find_run(str(whole), tmp_path) == whole
    for name, message in [("missing", "must be the folder of a run"), ("latest", "no run in .* has a checkpoint")]:
        with pytest.raises(ConfigError, match=message):
            find_run(name, tmp_path / "runs")
    older = _back_to(tmp_path / "runs" / "older", 4, source=whole)
    newer = _back_to(tmp_path / "runs" / "newer", 2, source=whole)
    os.utime(older / FOLDER / "step-00000004", (1, 1))
    os.utime(older / FOLDER / "step-00000002", (1, 1))
    (tmp_path / "runs" / "without").mkdir()
    assert find_run("latest", tmp_path / "runs") == newer
    shutil.rmtree(newer / FOLDER)
    assert find_run("latest", tmp_path / "runs") == older
    with pytest.raises(ConfigError, match="has no finished checkpoint"):
        find_run(str(newer), tmp_path)


# ---- the command ----


def _command(runs: Path, data: Path, *more: str) -> list[str]:
    small = ["--tokens-per-rank", "96", "--hidden", "32", "--layers", "1", "--name", "run"]
    return ["train", *small, "--data", str(data), "--runs-dir", str(runs), *more]


def test_a_kill_while_a_checkpoint_is_written_loses_only_the_steps_since_the_last_one(
    data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = _command(tmp_path, data, "--steps", "100000", "--checkpoint-every", "1")
    with subprocess.Popen([sys.executable, "-m", "distca", *command], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (whole_checkpoints(run_dir) and list(run_dir.glob(f"{FOLDER}/*.partial/*.distcp"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        process.kill()  # its ranks die with it
        process.communicate()
    last = max(whole_checkpoints(run_dir))
    before = _losses(run_dir)[:last]
    config = resumed_config(run_dir, {"steps": last + 2, "ranks": 1, "tokens_per_rank": 192})
    with one_rank():
        train(config, run_dir)
    assert len(_losses(run_dir)) == last + 2
    assert _losses(run_dir)[:last] == before
    assert sorted((run_dir / FOLDER).iterdir()) == list(whole_checkpoints(run_dir).values())
    assert list(whole_checkpoints(run_dir)) == [last + 1, last + 2]


def test_the_command_goes_on_where_an_interrupt_has_stopped_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_this_process(fn: Callable[..., dict], *args: Any, ranks: int) -> list[dict]:
        with one_rank():
            return [fn(*args)]

    def step_with_interrupt(*args: Any) -> StepResult:
        return replace(train_step(*args), interrupted=True)

    monkeypatch.setattr("distca.train.cli.launch", in_this_process)
    monkeypatch.setattr("distca.train.cli.signal.signal", lambda *_: None)
    runs = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr("distca.train.trainer.train_step", step_with_interrupt)
        assert main(_command(runs, data, "--ranks", "1", "--steps", "3")) == 130
    assert "go on with: distca train --resume" in capsys.readouterr().out
    assert main(["train", "--resume", "latest", "--runs-dir", str(runs)]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert len(_losses(runs / "run")) == 3
    assert main(["train", "--resume", str(runs / "run")]) == 2
    assert "--steps is 3, must be above the 3 steps" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "run"), "--steps", "4", "--lr", "0.003"]) == 0
    assert main(["train", "--resume", str(runs / "run"), "--steps", "5", "--lr", "0.002"]) == 2
    assert "--lr is 0.002, the run" in capsys.readouterr().err
