"""Runs of `pretrain_llama.py` in processes of a test."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.apps.pretrain.options import parse
from support.process_groups import leave_all_groups

#: Three steps of the tiny model. A step has four micro-batches' worth of slots on one data rank.
COMMON = {"STEPS": "3", "TOKENS_PER_RANK": "128", "MAX_DOCUMENT": "100", "MICRO_BATCHES": "4", "LAYERS": "4"}


def run(folder: Path, name: str, **variables: str) -> None:
    """A run of the tiny model in this process group.

    With the variable FORGOTTEN the run of the same name before it goes on without its checkpoint of that step.
    """
    from distca.apps.pretrain.train import train

    forgotten = variables.pop("FORGOTTEN", None)
    options = parse([], COMMON | variables).resolved(cuda=False, world_size=dist.get_world_size())
    run_dir = folder / name
    if dist.get_rank() == 0:
        run_dir.mkdir(exist_ok=True)
        if forgotten is not None:
            (run_dir / f"step-{forgotten}" / "run.json").unlink()
    dist.barrier()
    try:
        train(options, run_dir)
    except Exception as error:  # the other ranks may wait for this one; `launch` ends them
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
    dist.barrier()
    leave_all_groups()
    if dist.get_rank() == 0:  # the next run of this name goes on in this folder, and this log is kept
        number = len(list(folder.glob(f"{name} [0-9]")))
        shutil.copytree(run_dir, folder / f"{name} {number}", ignore=lambda *_: ["tensorboard"])


def run_all(folder: Path, cache: Path, runs: list[tuple[str, dict[str, str]]]) -> None:
    """Runs one after the other."""
    os.environ["DISTCA_CACHE"] = str(cache)
    for name, variables in runs:
        run(folder, name, **variables)


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that a run has logged."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
