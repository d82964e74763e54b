"""The optimizer: AdamW, and the learning rate of each step by a schedule of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig

_OPTIONS: dict[str, dict[str, float]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
}
"""The arguments of a schedule of transformers besides its numbers of steps."""


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """The optimizer of a wrapped model, and its schedule at step 0. Vectors (norms and biases) do not decay."""
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    if config.weight_decay > 0:
        vectors, others = ([one for one in model.parameters() if (one.dim() < 2) == few] for few in (True, False))
        groups = [{"params": others, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)
    return optimizer, make_schedule(optimizer, config)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """The schedule that `--schedule` names. If the run has fewer steps than the warm-up, all of it is warm-up."""
    try:
        return get_scheduler(
            config.schedule,
            optimizer,
            num_warmup_steps=min(config.warmup, config.steps),
            num_training_steps=config.steps,
            scheduler_specific_kwargs=_OPTIONS.get(config.schedule),
        )
    except ValueError as error:
        raise ConfigError(
            f"--schedule is {config.schedule}, which does not work with the other options: {error}"
        ) from error
