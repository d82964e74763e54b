"""`distca train --resume`: finds the run that goes on, and its configuration."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from distca.apps.common.files import read_object
from distca.apps.common.options import ConfigError
from distca.apps.train.checkpoint import check_whole, whole_checkpoints
from distca.apps.train.config import TINY, TrainConfig, option_name
from distca.apps.train.log import CONFIG, METRICS, steps_before
from distca.apps.train.tracking import FOLDER as WANDB

LATEST = "latest"


def find_run(resume: str, runs_dir: Path) -> Path:
    """The folder that `--resume` names: a path, or for `latest` the run in `runs_dir` with the newest checkpoint."""
    if resume == LATEST:
        runs = [
            (max(path.stat().st_mtime for path in found.values()), run_dir)
            for run_dir in (runs_dir.iterdir() if runs_dir.is_dir() else ())
            if (found := whole_checkpoints(run_dir))
        ]
        if not runs:
            raise ConfigError(f"--resume is {LATEST}, but no run in {runs_dir} has a checkpoint")
        return max(runs)[1]
    run_dir = Path(resume)
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(f"--resume is {resume}, must be the folder of a run (with a config.json) or {LATEST}")
    if not whole_checkpoints(run_dir):
        raise ConfigError(f"--resume is {resume}, which has no finished checkpoint")
    return run_dir


def saved_config(run_dir: Path) -> TrainConfig:
    """Reads the configuration of a run. Raises ConfigError if the file is missing or holds something else."""
    path = run_dir / CONFIG
    what_to_do = "restore the file, or start a new run"
    values = read_object(path, what_to_do)
    try:
        return TrainConfig.from_json(values)
    except ConfigError as error:
        raise ConfigError(f"{path} is not as a run leaves it: {error}; {what_to_do}") from error


def resumed_config(run_dir: Path, given: dict[str, Any]) -> TrainConfig:
    """The run's configuration, with the `given` options changed.

    Options that decide weights and batches may not change. The number of ranks may change if a step keeps its tokens.
    With more steps than the run was started with, its learning rates are stretched over them.

    Raises:
        ConfigError: an option may not change, or the run cannot go on from its last checkpoint.
    """
    _check_no_links(run_dir)
    saved = replace(saved_config(run_dir), export=None)  # a folder that may be anywhere
    if saved.trace:  # that file has the run's first steps, and may be anywhere
        saved = replace(saved, trace="")
    saved = replace(saved, accumulate=saved.micro_batches)  # also where the stages, which the default follows, change
    if "name" in given:
        raise ConfigError(f"--name is {given['name']}, but a resumed run goes on in its folder: leave it out")
    for option in fields(TrainConfig):
        before = saved.tiny(option.name) if saved.model is None and option.name in TINY else getattr(saved, option.name)
        if option.metadata["fixed"] and given.get(option.name, before) != before:
            raise ConfigError(
                f"{option_name(option.name)} is {given[option.name]}, the run {run_dir} has {before}: "
                "leave it out, or start a new run"
            )
    if given.get("pipeline", saved.pipeline) != saved.pipeline:  # what was said of the stages of before
        saved = replace(saved, layers_per_stage=None, chunks=1)
    if given.get("chunks", saved.chunks) != saved.chunks:
        saved = replace(saved, layers_per_stage=None)
    config = replace(saved, **given)
    if config.tokens_per_batch != saved.tokens_per_batch:
        per_rank, rest = divmod(saved.tokens_per_batch, config.data_ranks)
        fits = "" if rest else f"; with --ranks {config.ranks} that is --tokens-per-rank {per_rank}"
        ranks = f"{config.data_ranks} data ranks" if config.is_split else f"--ranks {config.ranks}"
        raise ConfigError(
            f"{ranks} times --tokens-per-rank {config.tokens_per_rank} are "
            f"{config.tokens_per_batch} tokens a step, must be the run's {saved.tokens_per_batch}{fits}"
        )
    taken, last = list(whole_checkpoints(run_dir).items())[-1]
    check_whole(last, taken)
    steps_before(taken, run_dir / METRICS)
    check_steps_left(config, taken, run_dir)
    return config


def check_steps_left(config: TrainConfig, taken: int, run_dir: Path) -> None:
    if taken >= config.steps:
        raise ConfigError(
            f"--steps is {config.steps}, must be above {taken}, the steps that {run_dir} has taken already"
        )


def _check_no_links(run_dir: Path) -> None:
    """Refuses links. A resumed run writes and removes files in its folder; through a link they lie elsewhere.

    Below the folder of wandb it does neither.
    """
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a symbolic link, and the run would write through it: replace it by the file or folder "
                    "itself"
                )
        if Path(folder) == run_dir and WANDB in folders:
            folders.remove(WANDB)
