"""What a run has trained, as a folder that `from_pretrained` of transformers reads: `--export` and `distca export`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distca.apps.train.checkpoint import check_whole, load_model, whole_checkpoints
from distca.apps.train.config import ConfigError
from distca.apps.train.corpora import read_corpora
from distca.apps.train.files import writing
from distca.apps.train.model import model_config
from distca.apps.train.resume import saved_config
from distca.apps.train.tokens import Tokenizer


def export_model(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Rank 0 writes the model, which may be sharded. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        _write(folder, model.config, state, tokenizer)


def export_run(run_dir: Path, folder: Path) -> int:
    """Writes the model of a run's last checkpoint, in this process alone. Returns the steps that it has taken.

    Raises ConfigError where the run has none, or has one that is damaged.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} must be a new or empty folder")
    config = saved_config(run_dir)
    checkpoints = whole_checkpoints(run_dir)
    if not checkpoints:
        raise ConfigError(f"{run_dir} has no finished checkpoint")
    step, checkpoint = list(checkpoints.items())[-1]
    check_whole(checkpoint, step)
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer is not None else None
    shape, _ = model_config(config, read_corpora(config, tokenizer)[0].vocabulary(tokenizer))
    model = _without_weights(shape)
    weights = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Any] = {
        name: torch.empty_like(one, device="cpu", dtype=config.weights_dtype if name in weights else one.dtype)
        for name, one in model.state_dict().items()
    }
    load_model(checkpoint, state)
    _write(folder, shape, state, tokenizer)
    return step


def _without_weights(shape: PreTrainedConfig) -> PreTrainedModel:
    # Through a dict, which leaves out how attention was computed here.
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(type(shape).from_dict(shape.to_dict()))
    return model


def _write(folder: Path, shape: PreTrainedConfig, state: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """All or nothing: a kill leaves another folder."""
    model = _without_weights(shape)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder):
        if partial.exists():
            shutil.rmtree(partial)
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save(partial)
        partial.rename(folder)
