"""Checkpoints of Megatron-core's dist_checkpointing, as Megatron's own training loop makes them."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from distca.apps.pretrain.checkpoints import sharded_state


def save(folder: Path, models: list[Any], optimizer: Any) -> None:
    """Writes the models and the optimizer into a new folder. It is collective."""
    folder.mkdir(parents=True, exist_ok=True)
    # Megatron starts a process for a queue that only asynchronous saves need.
    with mock.patch.object(filesystem_async, "_results_queue", queue.SimpleQueue()):
        dist_checkpointing.save(sharded_state(models, optimizer, is_loading=False), str(folder))


def load(folder: Path, models: list[Any], optimizer: Any) -> None:
    """Reads what `save` has written, at any split. It is collective."""
    # Without Transformer Engine and Apex, Megatron's distributed optimizer has no state to read into before a step.
    for model in models:
        model.zero_grad_buffer()
    optimizer.step()
    loaded = dist_checkpointing.load(sharded_state(models, optimizer, is_loading=True), str(folder))
    for number, model in enumerate(models):
        model.module.load_state_dict(loaded[f"model{number}"])
    optimizer.load_state_dict(loaded["optimizer"])
