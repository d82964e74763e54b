"""Checkpoints of `distca train`: resuming to the bit, kills while one is written, and what may change on the way."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distca
from distca.apps.cli import main
from distca.apps.train import manifest
from distca.apps.train.checkpoint import FOLDER, Checkpoints, whole_checkpoints
from distca.apps.train.cli import train_rank
from distca.apps.train.config import ConfigError, TrainConfig
from distca.apps.train.log import create_run_dir
from distca.apps.train.manifest import CheckpointError
from distca.apps.train.metrics import StepResult
from distca.apps.train.resume import find_run, resumed_config
from distca.apps.train.sources import DataError
from distca.apps.train.step import train_step
from distca.apps.train.trainer import train
from support.once import made_once
from support.ranks import launch
from support.train_runs import one_rank

# Three ranks: of two, the order in which gradients are added makes no difference.
SMALL = TrainConfig(ranks=3, steps=6, tokens_per_rank=64, hidden=32, layers=1, checkpoint_every=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "ping-pong, bfloat16 and retain": {"ping_pong": True, "dtype": "bfloat16", "retain_bytes": 1 << 20},
    "ping-pong, fsdp and compare": {"ping_pong": True, "fsdp": True, "compare": True},
}
OF_TWO_RANKS: dict[str, dict[str, Any]] = {"two ranks": {}, "two ranks and fsdp": {"fsdp": True}}
OF_ONE_RANK: dict[str, dict[str, Any]] = {"one rank": {}}


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
    """`whole` without interruption, and copies of it that were killed and go on; with other options one copy each."""
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
    _resumed_with(OPTIONS, whole, runs)


def _resumed_with(ways: dict[str, dict[str, Any]], whole: TrainConfig, runs: Path) -> None:
    for name, options in ways.items():
        run, again = runs / name, runs / f"{name}, resumed"
        if dist.get_rank() == 0:
            run.mkdir()
        train(replace(whole, **options), run)
        if dist.get_rank() == 0:
            _back_to(again, 2, source=run)
        dist.barrier()
        train(resumed_config(again, {}), again)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(runs: Path) -> Path:
        (runs / "whole").mkdir()
        launch(_whole_and_resumed, replace(SMALL, data=data, keep_checkpoints=3), runs, ranks=3)
        launch(_resumed_with, OF_TWO_RANKS, replace(SMALL, data=data, keep_checkpoints=3, ranks=2), runs, ranks=2)
        with one_rank():
            _resumed_with(OF_ONE_RANK, replace(SMALL, data=data, keep_checkpoints=3, ranks=1), runs)
        return runs

    return made_once(tmp_path_factory, "resumed_runs", make)


@pytest.fixture
def whole(runs: Path) -> Path:
    """A run of 6 steps on three ranks, its checkpoints after 2, 4 and 6 steps kept."""
    assert list(whole_checkpoints(runs / "whole")) == [2, 4, 6]
    return runs / "whole"


@pytest.mark.parametrize("name", ["early", "late"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once(name: str, runs: Path) -> None:
    assert _losses(runs / name) == _losses(runs / "whole")
    assert _bits(runs / name / FOLDER / "step-00000006") == _bits(runs / "whole" / FOLDER / "step-00000006")
    resumed, whole = (json.loads((runs / run / "summary.json").read_text()) for run in (name, "whole"))
    assert (resumed["steps"], resumed["interrupted"], resumed["loss_last"]) == (6, False, whole["loss_last"])
    kept = sorted(path.name for path in (runs / name / FOLDER).iterdir())
    assert kept == [f"step-{step:08}" for step in (2, 4, 6)]


def _bits(checkpoint: Path) -> dict[str, bytes]:
    """Of the tensors; the index beside them is pickled in no fixed order."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}


@pytest.mark.parametrize("name", OPTIONS | OF_TWO_RANKS | OF_ONE_RANK)
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted_to_the_bit(name: str, runs: Path) -> None:
    whole, resumed = runs / name, runs / f"{name}, resumed"
    assert _losses(resumed) == _losses(whole)
    assert _bits(resumed / FOLDER / "step-00000006") == _bits(whole / FOLDER / "step-00000006")


def test_resuming_on_more_ranks_with_the_same_tokens_a_step_gives_the_same_losses(whole: Path, tmp_path: Path) -> None:
    run_dir = _back_to(tmp_path / "run", 2, source=whole)
    config = resumed_config(run_dir, {"ranks": 4, "tokens_per_rank": 48})
    launch(train_rank, config, run_dir, ranks=4)
    assert _losses(run_dir) == pytest.approx(_losses(whole), rel=1e-6)


@pytest.mark.parametrize(("every", "kept"), [(1, [5, 6]), (0, [6])])
def test_only_the_last_checkpoints_are_kept(every: int, kept: list[int], data: Path, tmp_path: Path) -> None:
    config = replace(SMALL, data=data, runs_dir=tmp_path, checkpoint_every=every)
    run_dir = create_run_dir(config)
    with one_rank():
        train(config, run_dir)
    assert list(whole_checkpoints(run_dir)) == kept


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past that many bytes of a file is an error of the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [3_000, 40_000], ids=["in a header", "in a tensor"])
def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_it_and_the_systems_reason(
    size: int, data: Path, tmp_path: Path
) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))
    final = run_dir / FOLDER / "step-00000002"
    with one_rank(), largest_file(size), pytest.raises(distca.DistcaError) as caught:
        train(replace(SMALL, data=data), run_dir)
    assert re.fullmatch(
        rf"could not write the checkpoint {final}: on rank 0: File too large \(errno 27\); [\d,]+ bytes are free in "
        rf"{final.parent}; there is no whole one",
        str(caught.value),
    )
    assert list((run_dir / FOLDER).iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_what_fails_on_one_rank_around_a_checkpoint_is_an_error_on_all(
    call: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))
    real = getattr(Path, call)

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name != "step-00000004.partial":
            return real(path, *args, **options)
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch, one_rank():
        patch.setattr(Path, call, refuse)
        with pytest.raises(distca.DistcaError, match=r"Read-only file system \(errno 30\), .*step-00000004\.partial; "
                           r".* bytes are free in .*; the last whole one is .*step-00000002"):  # fmt: skip
            train(replace(SMALL, data=data), run_dir)
    assert list(whole_checkpoints(run_dir)) == [2]


def test_a_runs_file_that_cannot_be_written_is_an_error_that_names_the_run(data: Path, tmp_path: Path) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))
    with one_rank(), largest_file(100), pytest.raises(
        distca.DistcaError, match=rf"could not write {run_dir}: File too large \(errno 27\)"
    ):  # fmt: skip
        train(replace(SMALL, data=data), run_dir)


def _in_this_process(fn: Callable[..., dict], *args: Any, ranks: int) -> list[dict]:
    with one_rank():
        return [fn(*args)]


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _known_to_the_manifest(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    """What a hostile author does."""

    def damaged(path: Path) -> None:
        damage(path)
        manifest.main(str(path.parent))

    return damaged


LAST = f"{FOLDER}/step-00000004"
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("config.json", _cut_off, "is not JSON"),
    ("config.json", lambda path: path.write_text("[1, 2]"), "holds a list, must hold an object"),
    ("config.json", lambda path: path.write_text('{"steps": "many"}'), "--steps is 'many', must be of type int"),
    ("config.json", Path.unlink, "must be the folder of a run"),
    ("metrics.jsonl", lambda path: path.write_text("nonsense\n"), "line 1, is not a step of a run"),
    ("metrics.jsonl", lambda path: path.write_text('{"step": 1}\n'), "line 1, is not a step of a run"),
    (f"{LAST}/state.json", _cut_off, "bytes, must have"),
    (f"{LAST}/state.json", _known_to_the_manifest(_cut_off), "is not JSON"),
    (f"{LAST}/state.json", _known_to_the_manifest(lambda path: path.write_text('{"step": "x"}')),
     "must hold the integers step"),
    (f"{LAST}/state.json", _known_to_the_manifest(lambda path: path.write_text('{"step": 5, "ranks": 3, "corpus": 1}')),
     "says that 5 steps were taken, its folder's name says 4"),
    (f"{LAST}/state.json", Path.unlink, "is missing"),
    (f"{LAST}/manifest.json", _cut_off, "is not JSON"),
    (f"{LAST}/manifest.json", lambda path: path.write_text('{"files": 1}'), "must hold bytes and sha256"),
    (f"{LAST}/manifest.json", Path.unlink, "is missing: the checkpoint is damaged, or an earlier version wrote it"),
    (f"{LAST}/.metadata", _cut_off, "bytes, must have"),
    (f"{LAST}/__0_0.distcp", _cut_off, "bytes, must have"),
    (f"{LAST}/__0_0.distcp", Path.unlink, "is missing"),
    (f"{LAST}/__0_0.distcp", _altered, "its SHA-256 differs"),
    (f"{LAST}/.metadata", _altered, "its SHA-256 differs"),
    (f"{LAST}/.metadata", _known_to_the_manifest(_cut_off), "is not an index of a checkpoint"),
    (f"{LAST}/.metadata", _known_to_the_manifest(lambda path: path.write_bytes(b"cos\nsystem\n(S'exit'\ntR.")),
     "names os.system, which no index of a checkpoint needs"),
    (f"{LAST}/extra", Path.touch, "it does not belong to this checkpoint; remove it"),
]  # fmt: skip


def test_a_run_folder_that_is_damaged_is_an_error_that_names_the_file_and_what_to_do(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distca.apps.train.cli.launch", _in_this_process)
    monkeypatch.setattr("distca.apps.train.cli.signal.signal", lambda *_: None)
    for number, (file, damage, said) in enumerate(DAMAGES):
        run_dir = _back_to(tmp_path / str(number), 4, source=whole)
        damage(run_dir / file)
        options = ["--ranks", "1", "--tokens-per-rank", "192"]
        assert main(["train", "--resume", str(run_dir), *options]) == 2, (file, said)
        message = capsys.readouterr().err.split("distca train: error: ")[1]
        assert said in message and str(run_dir) in message and message.count("\n") == 1, (file, message)
        if file != "config.json":
            assert "remove" in message, (file, message)


def _refusals(run_dir: Path, checkpoint: str) -> list[str]:
    """What each rank is told."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(run_dir, keep=1).load(None, run_dir / checkpoint)  # type: ignore[arg-type]  # nothing is read
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, str(caught.value))
    return everyone


def _refusals_of_each_damaged_file(run_dir: Path) -> dict[str, list[str]]:
    told = {}
    for path in sorted((run_dir / LAST).glob("*.distcp")):
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            _altered(path)
        dist.barrier()
        told[path.name] = _refusals(run_dir, LAST)
        if dist.get_rank() == 0:
            path.write_bytes(content)
    return told


def test_a_damaged_file_that_one_rank_has_compared_is_named_on_all_ranks(whole: Path, tmp_path: Path) -> None:
    run_dir = _back_to(tmp_path / "run", 4, source=whole)
    told = launch(_refusals_of_each_damaged_file, run_dir, ranks=2)[0]
    assert list(told) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    for name, (first, second) in told.items():
        assert first == second
        assert f"{name} is damaged: its SHA-256 differs" in first


def test_a_checkpoint_of_a_version_without_manifests_goes_on_once_its_owner_has_made_one(
    whole: Path, tmp_path: Path
) -> None:
    run_dir = _back_to(tmp_path / "run", 4, source=whole)
    (run_dir / LAST / "manifest.json").unlink()
    state = json.loads((run_dir / LAST / "state.json").read_text())
    (run_dir / LAST / "state.json").write_text(json.dumps(state | {"files": {".metadata": [1, 2]}}))
    given = {"ranks": 1, "tokens_per_rank": 192}
    with pytest.raises(CheckpointError, match=rf"`python -m distca\.apps\.train\.manifest {run_dir / LAST}` makes it"):
        resumed_config(run_dir, given)
    manifest.main(str(run_dir / LAST))
    with one_rank():
        train(resumed_config(run_dir, given), run_dir)
    assert len(_losses(run_dir)) == 6


def test_a_run_without_a_step_left_is_refused_from_python_too(whole: Path) -> None:
    config = resumed_config(whole, {"steps": 7, "ranks": 1, "tokens_per_rank": 192})
    with (
        one_rank(),
        pytest.raises(ConfigError, match=r"--steps is 6, must be above 6, the steps that .* has taken already"),
    ):
        train(replace(config, steps=6), whole)


def test_a_run_that_goes_on_writes_and_removes_nothing_that_is_not_its_own(whole: Path, tmp_path: Path) -> None:
    run_dir = _back_to(tmp_path / "run", 4, source=whole)
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(config | {"trace": str(tmp_path / "of others")}))
    assert resumed_config(run_dir, {}).trace == ""
    assert resumed_config(run_dir, {"trace": "mine"}).trace == "mine"
    for kept in ("notes", "step-00000004 copy"):
        (run_dir / FOLDER / kept).mkdir()
    Checkpoints(run_dir, keep=1).remove_leftovers()
    assert sum(path.is_dir() for path in (run_dir / FOLDER).iterdir()) == 4
    for link in (run_dir / "config.json.new", run_dir / LAST / "__3_0.distcp", run_dir / "tensorboard" / "link"):
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
    def step_with_interrupt(*args: Any) -> StepResult:
        return replace(train_step(*args), interrupted=True)

    monkeypatch.setattr("distca.apps.train.cli.launch", _in_this_process)
    monkeypatch.setattr("distca.apps.train.cli.signal.signal", lambda *_: None)
    runs = tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setattr("distca.apps.train.trainer.train_step", step_with_interrupt)
        assert main(_command(runs, data, "--ranks", "1", "--steps", "3")) == 130
    assert "go on with: distca train --resume" in capsys.readouterr().out
    assert main(["train", "--resume", "latest", "--runs-dir", str(runs)]) == 0
    assert "finished after 3 steps" in capsys.readouterr().out
    assert len(_losses(runs / "run")) == 3
    assert main(["train", "--resume", str(runs / "run")]) == 2
    assert "--steps is 3, must be above 3, the steps" in capsys.readouterr().err
    assert main(["train", "--resume", str(runs / "run"), "--steps", "4", "--lr", "0.003"]) == 0
    assert main(["train", "--resume", str(runs / "run"), "--steps", "5", "--lr", "0.002"]) == 2
    assert "--lr is 0.002, the run" in capsys.readouterr().err
