"""Export: the trained model of a run as a folder that transformers' `from_pretrained` reads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distca.apps.common.files import writing
from distca.apps.common.options import ConfigError
from distca.apps.common.tokens import Tokenizer
from distca.apps.train.checkpoint import check_whole, load_model, whole_checkpoints
from distca.apps.train.model import read_config
from distca.apps.train.resume import saved_config

_MODEL = "model"
"""The folder in a run's folder with what a checkpoint lacks of the model: its configuration and the tokenizer."""


def save_description(run_dir: Path, shape: PreTrainedConfig, tokenizer: Tokenizer | None) -> None:
    """Writes what an export of the run needs beside a checkpoint, unless the run has it already."""
    folder = run_dir / _MODEL
    if folder.exists():
        return
    partial = run_dir / f"{_MODEL}.partial"
    with writing(run_dir):
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        _plain(shape).save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.rename(folder)


def export_model(model: PreTrainedModel, run_dir: Path, folder: Path) -> None:
    """Writes the model of the run, which may be sharded, on rank 0. It is collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        _write(folder, model.config, state, run_dir)


def export_run(run_dir: Path, folder: Path) -> int:
    """Writes the model of a run's last checkpoint, in this process alone. It reads nothing but the run's folder.

    Returns:
        The number of steps that the model was trained.

    Raises:
        ConfigError: the run has no checkpoint, or a damaged one, or the folder is not new or empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} must be a new or empty folder")
    config = saved_config(run_dir)
    checkpoints = whole_checkpoints(run_dir)
    if not checkpoints:
        raise ConfigError(f"{run_dir} has no finished checkpoint")
    step, checkpoint = list(checkpoints.items())[-1]
    check_whole(checkpoint, step)
    if not (run_dir / _MODEL / "config.json").is_file():
        raise ConfigError(f"{run_dir / _MODEL} has no config.json: restore the folder")
    shape = read_config(run_dir / _MODEL / "config.json", f"the model of the run is {run_dir / _MODEL}")
    model = _without_weights(shape)
    weights = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Any] = {
        name: torch.empty_like(one, device="cpu", dtype=config.weights_dtype if name in weights else one.dtype)
        for name, one in model.state_dict().items()
    }
    load_model(checkpoint, state)
    _write(folder, shape, state, run_dir)
    return step


def _without_weights(shape: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(_plain(shape))
    return model


def _plain(shape: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration without the attention implementation that was used here."""
    return type(shape).from_dict(shape.to_dict())


def _write(folder: Path, shape: PreTrainedConfig, state: dict[str, Any], run_dir: Path) -> None:
    """Writes model and tokenizer, all or nothing: a kill leaves only a new folder of another name beside it."""
    model = _without_weights(shape)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    with writing(folder):
        final = folder.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{final.name}.", dir=final.parent) as beside:
            partial = Path(beside, "partial")
            shutil.copytree(run_dir / _MODEL, partial, ignore=_links)
            model.save_pretrained(partial)
            partial.rename(final)


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_symlink()]
