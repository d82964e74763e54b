"""Checkpoints of Megatron-core's dist_checkpointing, as Megatron's own training loop makes them."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async


def save(folder: Path, models: list[Any], optimizer: Any) -> None:
    """Writes the models and the optimizer into a new folder. It is collective."""
    folder.mkdir(parents=True, exist_ok=True)
    # Megatron starts a process for a queue that only asynchronous saves need.
    with mock.patch.object(filesystem_async, "_results_queue", queue.SimpleQueue()):
        dist_checkpointing.save(_sharded(models, optimizer, is_loading=False), str(folder))


def load(folder: Path, models: list[Any], optimizer: Any) -> None:
    """Reads what `save` has written, at any split. It is collective."""
    # Without Transformer Engine and Apex, Megatron's distributed optimizer has no state to read into before a step.
    for model in models:
        model.zero_grad_buffer()
    optimizer.step()
    loaded = dist_checkpointing.load(_sharded(models, optimizer, is_loading=True), str(folder))
    for number, model in enumerate(models):
        model.module.load_state_dict(loaded[f"model{number}"])
    optimizer.load_state_dict(loaded["optimizer"])


def _sharded(models: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded: dict[str, Any] = {}
    for number, model in enumerate(models):  # without DistributedDataParallel, as Megatron's loop does it
        sharded[f"model{number}"] = model.module.sharded_state_dict(metadata=metadata)
    sharded["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata)
    return sharded
