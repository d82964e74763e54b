"""Checkpoints of `distca train`: which are kept, and what a write that fails or is killed leaves behind."""

import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.apps.train.checkpoint import FOLDER, whole_checkpoints
from distca.apps.train.corpora import read_corpora
from distca.apps.train.log import create_run_dir
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.resumed_runs import SMALL, losses_of, train_command
from support.train_runs import one_rank


@pytest.mark.parametrize(("every", "kept"), [(1, [5, 6]), (0, [6])])
def test_only_the_last_checkpoints_are_kept(every: int, kept: list[int], texts: Path, tmp_path: Path) -> None:
    config = replace(SMALL, data=texts, runs_dir=tmp_path, checkpoint_every=every)
    run_dir = create_run_dir(config)
    with one_rank():
        train(config, run_dir)
    assert list(whole_checkpoints(run_dir)) == kept


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Makes a write past `size` bytes of any file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def read_texts(texts: Path) -> Path:
    """The texts, whose tokens are in the cache already: making them would pass `largest_file` first."""
    read_corpora(replace(SMALL, data=texts), None)
    return texts


@pytest.mark.parametrize("size", [3_000, 40_000], ids=["in a header", "in a tensor"])
def test_a_checkpoint_that_cannot_be_written_is_an_error_that_names_it_and_the_systems_reason(
    size: int, read_texts: Path, tmp_path: Path
) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))
    final = run_dir / FOLDER / "step-00000002"
    with one_rank(), largest_file(size), pytest.raises(distca.DistcaError) as caught:
        train(replace(SMALL, data=read_texts), run_dir)
    assert re.fullmatch(
        rf"could not write the checkpoint {final}: on rank 0: File too large \(errno 27\); [\d,]+ bytes are free in "
        rf"{final.parent}; there is no whole one",
        str(caught.value),
    )
    assert list((run_dir / FOLDER).iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_what_fails_on_one_rank_around_a_checkpoint_is_an_error_on_all(
    call: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            train(replace(SMALL, data=texts), run_dir)
    assert list(whole_checkpoints(run_dir)) == [2]


def test_a_runs_file_that_cannot_be_written_is_an_error_that_names_the_run(read_texts: Path, tmp_path: Path) -> None:
    run_dir = create_run_dir(replace(SMALL, runs_dir=tmp_path))
    with one_rank(), largest_file(100), pytest.raises(
        distca.DistcaError, match=rf"could not write {run_dir}: File too large \(errno 27\)"
    ):  # fmt: skip
        train(replace(SMALL, data=read_texts), run_dir)


def test_a_kill_while_a_checkpoint_is_written_loses_only_the_steps_since_the_last_one(
    texts: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = train_command(tmp_path, texts, "--steps", "100000", "--checkpoint-every", "1")
    with subprocess.Popen([sys.executable, "-m", "distca", *command], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (whole_checkpoints(run_dir) and list(run_dir.glob(f"{FOLDER}/*.partial/*.distcp"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        process.kill()  # its ranks die with it
        process.communicate()
    last = max(whole_checkpoints(run_dir))
    before = losses_of(run_dir)[:last]
    config = resumed_config(run_dir, {"steps": last + 2, "ranks": 1, "tokens_per_rank": 192})
    with one_rank():
        train(config, run_dir)
    assert len(losses_of(run_dir)) == last + 2
    assert losses_of(run_dir)[:last] == before
    assert sorted((run_dir / FOLDER).iterdir()) == list(whole_checkpoints(run_dir).values())
    assert list(whole_checkpoints(run_dir)) == [last + 1, last + 2]
