"""Export: the trained model of a run as a folder that transformers' `from_pretrained` reads."""

from __future__ import annotations

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
from distca.apps.train.corpora import read_corpora
from distca.apps.train.model import model_config
from distca.apps.train.resume import saved_config


def export_model(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Writes the model, which may be sharded, on rank 0. It is collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        _write(folder, model.config, state, tokenizer)


def export_run(run_dir: Path, folder: Path) -> int:
    """Writes the model of a run's last checkpoint, in this process alone.

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
    # from_dict leaves out the attention implementation that was used here.
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(type(shape).from_dict(shape.to_dict()))
    return model


def _write(folder: Path, shape: PreTrainedConfig, state: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Writes all or nothing: a kill leaves only a new folder of another name beside it."""
    model = _without_weights(shape)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    with writing(folder):
        final = folder.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{final.name}.", dir=final.parent) as beside:
            partial = Path(beside, "partial")
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save(partial)
            partial.rename(final)
