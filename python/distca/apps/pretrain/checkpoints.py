"""Checkpoints of a run by Megatron-core's dist_checkpointing. They may be read at another split."""

from __future__ import annotations

import json
import queue
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from distca.errors import DistcaError, InvalidArgumentError

_STATE = "run.json"
_FOLDER = re.compile(r"step-(\d+)")
#: Megatron and PyTorch raise many kinds. PyTorch's own has what the ranks have raised, and is no Exception.
_FAILURES = (Exception, CheckpointException)


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        step: steps taken.
        documents: fingerprint of the documents.
        fixed: what a resumed run must have too, by name.
    """

    step: int
    documents: int
    fixed: dict[str, Any]


def whole_checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, the last one last."""
    found = [(match, path) for path in run_dir.glob("step-*") if (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in found) if (path / _STATE).is_file()]


def remove_unfinished(run_dir: Path) -> None:
    """Removes what a killed run left half written or half removed. One rank calls it, before the first save."""
    for path in run_dir.glob("step-*"):
        if _FOLDER.fullmatch(path.name) and not (path / _STATE).exists():
            shutil.rmtree(path, ignore_errors=True)


def save(run_dir: Path, state: State, chunks: list[Any], optimizer: Any, *, keep: int) -> None:
    """Writes a checkpoint, and removes those before the last `keep`. It is collective.

    What says that it is whole is written last.

    Raises:
        DistcaError: it could not be written.
    """
    folder = run_dir / f"step-{state.step}"
    _on_first(lambda: _begin(folder))
    # What writes and what takes the results are this process. Megatron would start another one for their queue, which
    # outlives a process that is killed.
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        dist_checkpointing.save(sharded_state(chunks, optimizer, is_loading=False), str(folder))
    except _FAILURES as error:
        raise DistcaError(f"could not write the checkpoint {folder}: {_why(error)}") from error
    _on_first(lambda: _finish(run_dir, folder, state, keep))


def _begin(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while it wrote
    folder.mkdir(parents=True)


def _finish(run_dir: Path, folder: Path, state: State, keep: int) -> None:
    new = folder / f"{_STATE}.new"
    new.write_text(json.dumps(vars(state)) + "\n", encoding="utf-8")
    new.replace(folder / _STATE)
    for old in whole_checkpoints(run_dir)[:-keep]:
        (old / _STATE).unlink()  # from here on it is no checkpoint
        shutil.rmtree(old)


def load(folder: Path, chunks: list[Any], optimizer: Any, *, documents: int, fixed: dict[str, Any]) -> State:
    """Reads what `save` has written, at any split. It is collective.

    Raises:
        InvalidArgumentError: the run has other documents or another one of the fixed options.
        DistcaError: the checkpoint is damaged.
    """
    try:
        state = State(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
        changed = [name for name, value in state.fixed.items() if fixed[name] != value]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DistcaError(f"the checkpoint {folder} has a damaged {_STATE}: {error}") from error
    if changed:
        name = changed[0]
        given, before = (int(value) if isinstance(value, bool) else value for value in (fixed[name], state.fixed[name]))
        change = f"set {name}={before}" if name.isidentifier() else "make it the same"
        raise InvalidArgumentError(
            f"{name} is {given}, and the run that is resumed has {before}: {change}, or name another --run-dir "
            "(RUN_DIR)"
        )
    if state.documents != documents:
        raise InvalidArgumentError(f"the documents are not those of {folder}: give the same DATA, DOC_SCALE, TOKENIZER")
    # Without Transformer Engine and Apex, the distributed optimizer has the state that it reads into after a step.
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    try:
        loaded = dist_checkpointing.load(sharded_state(chunks, optimizer, is_loading=True), str(folder))
        for number, chunk in enumerate(chunks):
            chunk.module.load_state_dict(loaded[f"model{number}"])
        optimizer.load_state_dict(loaded["optimizer"])
    except _FAILURES as error:
        raise DistcaError(f"the checkpoint {folder} cannot be read: {_why(error)}") from error
    return state


def sharded_state(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """What dist_checkpointing writes and reads: chunks without DistributedDataParallel, and their optimizer."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)
    }
    sharded["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata)
    return sharded


def _on_first(act: Any) -> None:
    """Calls a function on rank 0 while the others wait. All raise what it raises."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            act()
        except Exception as error:
            told = [_why(error)]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise DistcaError(f"could not write a checkpoint: {told[0]}")


def _why(error: BaseException) -> str:
    """What went wrong, in a line: of PyTorch's error what the first of the ranks that failed has raised."""
    if isinstance(error, CheckpointException):
        error, _ = error.failures[min(error.failures)]
    return " ".join(str(error).split())[:300] or type(error).__name__
