"""A resumed run of `distca train` takes the same steps to the bit, and what may change on the way."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distca.apps.cli import main
from distca.apps.common.options import ConfigError
from distca.apps.common.run_lock import locked
from distca.apps.common.sources import DataError
from distca.apps.train.checkpoint import FOLDER, Checkpoints, Trained, whole_checkpoints
from distca.apps.train.cli import train_rank
from distca.apps.train.config import TrainConfig
from distca.apps.train.metrics import StepResult
from distca.apps.train.optimizer import make_optimizer
from distca.apps.train.resume import find_run, resumed_config
from distca.apps.train.step import train_step, update
from distca.apps.train.trainer import train
from distca.errors import DistcaError
from support.ranks import launch
from support.resumed_runs import (
    LAST,
    OF_ONE_RANK,
    OF_TWO_RANKS,
    OPTIONS,
    bits_of,
    in_this_process,
    killed_after,
    losses_of,
    train_command,
)
from support.train_runs import one_rank


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once(name: str, resumed_runs: Path) -> None:
    assert losses_of(resumed_runs / name) == losses_of(resumed_runs / "whole")
    last_of_both = [bits_of(resumed_runs / run / FOLDER / "step-00000006") for run in (name, "whole")]
    assert last_of_both[0] == last_of_both[1]
    resumed, whole = (json.loads((resumed_runs / run / "summary.json").read_text()) for run in (name, "whole"))
    assert (resumed["steps"], resumed["interrupted"], resumed["loss_last"]) == (6, False, whole["loss_last"])
    kept = sorted(path.name for path in (resumed_runs / name / FOLDER).iterdir())
    assert kept == [f"step-{step:08}" for step in (2, 4, 6)]


@pytest.mark.parametrize("name", OPTIONS | OF_TWO_RANKS | OF_ONE_RANK)
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted_to_the_bit(
    name: str, resumed_runs: Path
) -> None:
    whole, resumed = resumed_runs / name, resumed_runs / f"{name}, resumed"
    assert losses_of(resumed) == losses_of(whole)
    assert bits_of(resumed / FOLDER / "step-00000006") == bits_of(whole / FOLDER / "step-00000006")


def test_resuming_on_more_ranks_with_the_same_tokens_a_step_gives_the_same_losses(
    whole_run: Path, tmp_path: Path
) -> None:
    run_dir = killed_after(tmp_path / "run", 2, source=whole_run)
    config = resumed_config(run_dir, {"ranks": 4, "tokens_per_rank": 48})
    launch(train_rank, config, run_dir, ranks=4)
    assert losses_of(run_dir) == pytest.approx(losses_of(whole_run), rel=1e-6)


def test_a_run_without_a_step_left_is_refused_from_python_too(whole_run: Path) -> None:
    config = resumed_config(whole_run, {"steps": 7, "ranks": 1, "tokens_per_rank": 192})
    with (
        one_rank(),
        pytest.raises(ConfigError, match=r"--steps is 6, must be above 6, the steps that .* has taken already"),
    ):
        train(replace(config, steps=6), whole_run)


def test_a_run_that_goes_on_writes_and_removes_nothing_that_is_not_its_own(whole_run: Path, tmp_path: Path) -> None:
    run_dir = killed_after(tmp_path / "run", 4, source=whole_run)
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(config | {"trace": str(tmp_path / "of others")}))
    assert resumed_config(run_dir, {}).trace == ""
    assert resumed_config(run_dir, {"trace": "mine"}).trace == "mine"
    for kept in ("notes", "step-00000004 copy"):
        (run_dir / FOLDER / kept).mkdir()
    Checkpoints(run_dir, keep=1).remove_leftovers()
    assert sum(path.is_dir() for path in (run_dir / FOLDER).iterdir()) == 4
    (run_dir / "wandb" / "run").mkdir(parents=True)
    for link in (run_dir / "wandb" / "latest-run", run_dir / "wandb" / "run" / "debug.log"):  # wandb makes them
        link.symlink_to(tmp_path)
    assert resumed_config(run_dir, {}).trace == ""
    shutil.rmtree(run_dir / "wandb")
    for link in (
        run_dir / "wandb",
        run_dir / "config.json.new",
        run_dir / LAST / "__3_0.distcp",
        run_dir / "tensorboard" / "link",
    ):
        link.symlink_to(tmp_path)
        with pytest.raises(ConfigError, match=f"{link} is a symbolic link"):
            resumed_config(run_dir, {})
        link.unlink()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 1.0}, "--lr is 1.0, the run RUN has 0.003: leave it out, or start a new run"),
        ({"hidden": 64}, "--hidden is 64, the run RUN has 32"),
        ({"seed": 3}, "--seed is 3, the run RUN has 0"),
        ({"clip_norm": 1.0}, "--clip-norm is 1.0, the run RUN has None"),
        ({"accumulate": 2}, "--accumulate is 2, the run RUN has 1"),
        ({"schedule": "linear"}, "--schedule is linear, the run RUN has cosine_warmup_with_min_lr"),
        ({"eval_fraction": 0.1}, "--eval-fraction is 0.1, the run RUN has None"),
        ({"ranks": 2}, "--ranks 2 times --tokens-per-rank 64 are 128 tokens a step, must be the run's 192; with "
         "--ranks 2 that is --tokens-per-rank 96"),
        ({"name": "other"}, "--name is other, but a resumed run goes on in its folder"),
        ({"steps": 6}, "--steps is 6, must be above 6, the steps that RUN has taken already"),
    ],
)  # fmt: skip
def test_an_option_that_a_resumed_run_must_keep_is_refused_by_name(given: dict, message: str, whole_run: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("RUN", str(whole_run)))):
        resumed_config(whole_run, given)


def test_what_does_not_decide_the_steps_may_change_and_steps_may_be_added(whole_run: Path) -> None:
    given = {"steps": 9, "balance": "off", "timeout": 5.0, "checkpoint_every": 1, "ranks": 1, "tokens_per_rank": 192}
    config = resumed_config(whole_run, given)
    assert {name: getattr(config, name) for name in given} == given
    assert (config.hidden, config.seed, config.data) == (32, 0, resumed_config(whole_run, {"steps": 7}).data)


def test_other_documents_than_the_run_had_are_refused(whole_run: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other").write_text("other text " * 50)
    run_dir = killed_after(tmp_path / "run", 4, source=whole_run)
    config = resumed_config(run_dir, {"data": tmp_path / "data", "ranks": 1, "tokens_per_rank": 192})
    with one_rank(), pytest.raises(DataError, match="the documents are not those of the checkpoint"):
        train(config, run_dir)


def test_resume_finds_the_run_by_its_folder_or_the_newest_checkpoint(whole_run: Path, tmp_path: Path) -> None:
    assert find_run(str(whole_run), tmp_path) == whole_run
    for name, message in [("missing", "must be the folder of a run"), ("latest", "no run in .* has a checkpoint")]:
        with pytest.raises(ConfigError, match=message):
            find_run(name, tmp_path / "runs")
    older = killed_after(tmp_path / "runs" / "older", 4, source=whole_run)
    newer = killed_after(tmp_path / "runs" / "newer", 2, source=whole_run)
    os.utime(older / FOLDER / "step-00000004", (1, 1))
    os.utime(older / FOLDER / "step-00000002", (1, 1))
    (tmp_path / "runs" / "without").mkdir()
    assert find_run("latest", tmp_path / "runs") == newer
    shutil.rmtree(newer / FOLDER)
    assert find_run("latest", tmp_path / "runs") == older
    with pytest.raises(ConfigError, match="has no finished checkpoint"):
        find_run(str(newer), tmp_path)


def test_a_run_that_is_under_way_is_not_resumed_beside_it(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = killed_after(tmp_path / "run", 4, source=whole_run)
    partial = run_dir / FOLDER / "step-00000006.partial"
    partial.mkdir()
    with locked(run_dir):
        assert main(["train", "--resume", str(run_dir)]) == 2
    assert f"another run is under way in {run_dir}: wait until it has ended" in capsys.readouterr().err
    assert partial.exists() and list(whole_checkpoints(run_dir)) == [2, 4]
    with locked(run_dir):
        pass


@pytest.mark.parametrize("failure", [KeyboardInterrupt, DistcaError("no rank")])
def test_a_failure_before_anything_is_written_leaves_no_folder(
    failure: Any, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.apps.train.cli.start_ranks", mock.Mock(side_effect=failure))
    monkeypatch.setattr("distca.apps.common.options.signal.signal", lambda *_: None)
    assert main(train_command(tmp_path / "runs", texts)) in (1, 130)
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_command_goes_on_where_an_interrupt_has_stopped_it(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step_with_interrupt(*args: Any) -> StepResult:
        return replace(train_step(*args), interrupted=True)

    monkeypatch.setattr("distca.apps.train.cli.start_ranks", in_this_process)
    monkeypatch.setattr("distca.apps.common.options.signal.signal", lambda *_: None)
    runs = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr("distca.apps.train.trainer.train_step", step_with_interrupt)
        assert main(train_command(runs, texts, "--ranks", "1", "--steps", "3")) == 130
    assert "go on with: distca train --resume" in capsys.readouterr().out
    assert main(["train", "--resume", "latest", "--runs-dir", str(runs)]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert len(losses_of(runs / "run")) == 3
    assert main(["train", "--resume", str(runs / "run")]) == 2
    assert "--steps is 3, must be above 3, the steps" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "run"), "--steps", "4", "--lr", "0.003"]) == 0
    assert main(["train", "--resume", str(runs / "run"), "--steps", "5", "--lr", "0.002"]) == 2
    assert "--lr is 0.002, the run" in capsys.readouterr().err


def test_an_interrupt_in_the_last_step_leaves_nothing_out(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distca.apps.train.cli.start_ranks", in_this_process)
    monkeypatch.setattr("distca.apps.common.options.signal.signal", lambda *_: None)
    monkeypatch.setattr(
        "distca.apps.train.trainer.train_step", lambda *args: replace(train_step(*args), interrupted=True)
    )
    more = ["--ranks", "1", "--steps", "1", "--eval-fraction", "0.5", "--export", str(tmp_path / "exported")]
    assert main(train_command(tmp_path / "runs", texts, *more)) == 0
    out = capsys.readouterr().out
    assert "finished after 1 steps" in out and "evaluated" in out and "go on with" not in out
    assert (tmp_path / "exported" / "config.json").is_file()


def test_the_first_step_after_a_resume_with_more_steps_has_the_learning_rate_of_all_steps() -> None:
    def trained(steps: int) -> Trained:
        model = torch.nn.Linear(2, 2)
        return Trained(model, *make_optimizer(model, TrainConfig(steps=steps, weight_decay=0.1)))

    def step(one: Trained) -> None:
        one.model(torch.ones(2)).sum().backward()
        update(one)

    short, long, resumed = trained(10), trained(20), trained(20)
    with one_rank():
        for _ in range(8):
            step(short)
            step(long)
        resumed.set_state(short.state(1))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [long.schedule.get_last_lr()[0]] * 2
    assert short.schedule.get_last_lr() != long.schedule.get_last_lr()
