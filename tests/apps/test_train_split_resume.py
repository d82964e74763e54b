"""A run goes on from its checkpoint in another form: with other stages, chunks, tensor ranks and shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.once import made_once
from support.ranks import launch
from support.resumed_runs import bits_of, killed_after, losses_of
from support.split_runs import Way, write_files
from support.train_runs import one_rank, without_pictures

OPTIONS = {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 2}
ALONE, DATA = Way(1, {}, "qwen3", OPTIONS), Way(4, {}, "qwen3", OPTIONS)
BOTH = replace(DATA, split={"pipeline": 2, "tensor": 2})
STAGES = replace(DATA, split={"pipeline": 2})
CHUNKS = replace(DATA, split={"pipeline": 2, "chunks": 2})
DEALT = replace(DATA, split={"pipeline": 2, "layers_per_stage": "3,1"})
SHARDS = replace(DATA, split={"pipeline": 2, "fsdp": True})
TENSOR_SHARDS = replace(DATA, split={"tensor": 2, "fsdp": True})
FORMS = {
    "one rank": ALONE,
    "data ranks": DATA,
    "stages of tensor ranks": BOTH,
    "stages of data ranks": STAGES,
    "chunks": CHUNKS,
    "dealt by hand": DEALT,
    "shards in stages": SHARDS,
    "shards of tensor ranks": TENSOR_SHARDS,
}
CHANGES = [
    ("stages of tensor ranks", "one rank"),
    ("one rank", "stages of tensor ranks"),
    ("stages of data ranks", "data ranks"),
    ("data ranks", "shards in stages"),
    ("chunks", "stages of data ranks"),
    ("dealt by hand", "chunks"),
    ("shards in stages", "stages of data ranks"),
    ("stages of data ranks", "shards of tensor ranks"),
    ("shards of tensor ranks", "shards in stages"),
]
SAME = ["stages of tensor ranks", "chunks", "shards in stages", "shards of tensor ranks"]


def _given(way: Way, files: Path) -> dict[str, Any]:
    """All options in which the forms differ, as a user would give them."""
    config = way.config(files)
    names = ("ranks", "tokens_per_rank", "pipeline", "tensor", "chunks", "fsdp", "layers_per_stage")
    return {name: getattr(config, name) for name in names}


@without_pictures()
def _whole(names: list[str], folder: Path) -> None:
    for name in names:
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(FORMS[name].config(folder), folder / name)


@without_pictures()
def _resumed(changes: list[tuple[str, str]], folder: Path) -> None:
    for before, after in changes:
        run = folder / f"{before}, then {after}"
        if dist.get_rank() == 0:
            killed_after(run, 2, source=folder / before)
        dist.barrier()
        train(resumed_config(run, {} if before == after else _given(FORMS[after], folder)), run)


def _of(ranks: int, names: list[str]) -> list[str]:
    return [name for name in names if FORMS[name].ranks == ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        write_files(folder, ["qwen3"])
        changes = [*CHANGES, *((name, name) for name in SAME)]
        with one_rank():
            _whole(_of(1, list(FORMS)), folder)
        launch(_whole, _of(4, list(FORMS)), folder, ranks=4)
        with one_rank():
            _resumed([change for change in changes if FORMS[change[1]].ranks == 1], folder)
        launch(_resumed, [change for change in changes if FORMS[change[1]].ranks == 4], folder, ranks=4)
        return folder

    return made_once(tmp_path_factory, "runs_in_other_forms", make)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_run_that_goes_on_in_another_form_takes_the_steps_of_one_that_was_not_stopped(
    before: str, after: str, runs: Path
) -> None:
    whole = losses_of(runs / "one rank")
    assert len(whole) == 4 and whole[3] < 0.98 * whole[1]
    resumed = losses_of(runs / f"{before}, then {after}")
    worst = max(abs(a - b) / b for a, b in zip(resumed, whole, strict=True))
    print(f"{before}, then {after}: {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize("name", SAME)
def test_a_run_that_goes_on_in_the_same_form_takes_the_same_steps_to_the_bit(name: str, runs: Path) -> None:
    resumed = runs / f"{name}, then {name}"
    assert losses_of(resumed) == losses_of(runs / name)
    ours, whole = (bits_of(whole_checkpoints(run)[4]) for run in (resumed, runs / name))
    assert len(whole) == 4 and ours == whole
