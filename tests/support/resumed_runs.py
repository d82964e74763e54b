"""Runs of `distca train` that were killed and resumed, beside the same runs without interruption."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.apps.train.checkpoint import FOLDER, whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.train_runs import metrics_in, one_rank, without_pictures

# Three ranks, because the order in which gradients are added makes no difference with two.
SMALL = TrainConfig(ranks=3, steps=6, tokens_per_rank=64, hidden=32, layers=1, checkpoint_every=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "ping-pong, bfloat16 and retain": {"ping_pong": True, "dtype": "bfloat16", "retain_bytes": 1 << 20},
    "ping-pong, fsdp and compare": {"ping_pong": True, "fsdp": True, "compare": True},
}
OF_TWO_RANKS: dict[str, dict[str, Any]] = {"two ranks": {}, "two ranks and fsdp": {"fsdp": True}}
OF_ONE_RANK: dict[str, dict[str, Any]] = {"one rank": {}}
LAST = f"{FOLDER}/step-00000004"  # of a run that `killed_after` step 4 leaves behind


def losses_of(run_dir: Path) -> list[float]:
    metrics = metrics_in(run_dir)
    assert [step["step"] for step in metrics] == list(range(len(metrics)))
    return [step["loss"] for step in metrics]


def bits_of(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint's tensors by name; the index beside them is left out, because its bytes vary."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}


def killed_after(run_dir: Path, step: int, *, source: Path) -> Path:
    """A copy of a run as if it had been killed some time after the checkpoint of that step."""
    shutil.copytree(source, run_dir)
    for taken, folder in whole_checkpoints(run_dir).items():
        if taken > step:
            shutil.rmtree(folder)
    (run_dir / "summary.json").unlink()
    return run_dir


@without_pictures()
def whole_and_resumed(whole: TrainConfig, runs: Path) -> None:
    """Trains `whole`, resumes copies of it that were killed early and late, and trains with `OPTIONS` too."""
    train(whole, runs / "whole")
    if dist.get_rank() == 0:
        early, late = (
            killed_after(runs / name, step, source=runs / "whole") for name, step in (("early", 2), ("late", 4))
        )
        (early / FOLDER / "step-00000004.partial").mkdir()
        (early / FOLDER / "step-00000004.partial" / "__0_0.distcp").write_bytes(b"half")
        (early / FOLDER / "step-00000000.removed").mkdir()
        with open(late / "metrics.jsonl", "a") as file:
            file.write('{"step": 6, "los')  # cut off by the kill
    dist.barrier()
    for name in ("early", "late"):
        train(resumed_config(runs / name, {}), runs / name)
    resumed_with(OPTIONS, whole, runs)


@without_pictures()
def resumed_with(ways: dict[str, dict[str, Any]], whole: TrainConfig, runs: Path) -> None:
    """For each way: a run without interruption, and a copy of it that was killed after step 2 and resumed."""
    for name, options in ways.items():
        run, again = runs / name, runs / f"{name}, resumed"
        if dist.get_rank() == 0:
            run.mkdir()
        train(replace(whole, **options), run)
        if dist.get_rank() == 0:
            killed_after(again, 2, source=run)
        dist.barrier()
        train(resumed_config(again, {}), again)


def in_this_process(fn: Callable[..., dict], *args: Any, ranks: int, imports: Sequence[str]) -> list[dict]:
    """Stands for `start_ranks`, on one rank that is this process."""
    with one_rank():
        return [fn(*args)]


def train_command(runs: Path, data: Path, *more: str) -> list[str]:
    """The arguments of `distca` for a small run in `runs / "run"`."""
    small = ["--tokens-per-rank", "96", "--hidden", "32", "--layers", "1", "--name", "run"]
    return ["train", *small, "--data", str(data), "--runs-dir", str(runs), *more]
