"""`distca train --resume`: which run goes on, and with which configuration."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from distca.train.checkpoint import whole_checkpoints
from distca.train.config import TINY, ConfigError, TrainConfig, option_name

LATEST = "latest"


def find_run(resume: str, runs_dir: Path) -> Path:
    """The folder that `--resume` names: a path, or `latest` for the run in `runs_dir` with the newest checkpoint."""
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
    if not (run_dir / "config.json").is_file():
        raise ConfigError(f"--resume is {resume}, must be the folder of a run (with a config.json) or {LATEST}")
    if not whole_checkpoints(run_dir):
        raise ConfigError(f"--resume is {resume}, which has no finished checkpoint")
    return run_dir


def resumed_config(run_dir: Path, given: dict[str, Any]) -> TrainConfig:
    """The run's configuration, with the `given` options changed that may change.

    What decides the weights and batches must stay; ranks may change if a step keeps its tokens. More steps than the
    run was started with stretch its learning rates.
    """
    saved = TrainConfig.from_json(json.loads((run_dir / "config.json").read_text(encoding="utf-8")))
    if "name" in given:
        raise ConfigError(f"--name is {given['name']}, but a resumed run goes on in its folder: leave it out")
    for option in fields(TrainConfig):
        before = saved.tiny(option.name) if saved.model is None and option.name in TINY else getattr(saved, option.name)
        if option.metadata["fixed"] and given.get(option.name, before) != before:
            raise ConfigError(
                f"{option_name(option.name)} is {given[option.name]}, the run {run_dir} has {before}: "
                "leave it out, or start a new run"
            )
    config = replace(saved, **given)
    if config.tokens_per_step != saved.tokens_per_step:
        per_rank, rest = divmod(saved.tokens_per_step, config.ranks)
        fits = "" if rest else f"; with --ranks {config.ranks} that is --tokens-per-rank {per_rank}"
        raise ConfigError(
            f"--ranks {config.ranks} times --tokens-per-rank {config.tokens_per_rank} are "
            f"{config.tokens_per_step} tokens a step, must be the run's {saved.tokens_per_step}{fits}"
        )
    taken = max(whole_checkpoints(run_dir))
    if taken >= config.steps:
        raise ConfigError(f"--steps is {config.steps}, must be above the {taken} steps that {run_dir} has taken")
    return config
