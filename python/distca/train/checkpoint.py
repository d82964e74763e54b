"""Checkpoints of a run: everything that the next step depends on, written so that no kill can damage one.

A checkpoint is a folder `RUN/checkpoints/step-00000020` made by `torch.distributed.checkpoint`, every rank writing its
part: weights, optimizer, schedule and each rank's random state after that many steps, and `state.json` with the rest.
It is written under another name, synced to the disk and then renamed, so a folder of that name is whole; what a kill
leaves under other names is removed when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LRScheduler

from distca.errors import DistcaError

FOLDER = "checkpoints"
_STATE = "state.json"
_WHOLE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says in `state.json`."""

    step: int  # steps taken; with the seed and the tokens of a step it is the position in the data
    ranks: int
    corpus: int  # fingerprint of the documents


@dataclass
class Trained:
    """What training changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    saved: torch.nn.Module | None = None  # the part of the model whose names a checkpoint has, where not all of it

    def state(self, saved_ranks: int) -> dict[str, Any]:
        """By name, for `torch.distributed.checkpoint`; each rank adds its own random state if there is one of it."""
        model, optimizer = get_state_dict(self.saved or self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}
        if dist.get_rank() < saved_ranks:
            state[_random_key()] = torch.get_rng_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.saved or self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        if (random := state.get(_random_key())) is not None:
            torch.set_rng_state(random)


def _random_key() -> str:
    return f"random/{dist.get_rank()}"


def whole_checkpoints(run_dir: Path) -> dict[int, Path]:
    """The finished checkpoints of a run by their number of steps, in ascending order."""
    folder = run_dir / FOLDER
    found = [(match, path) for path in _entries(folder) if (match := _WHOLE.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found))


def read_state(checkpoint: Path) -> RunState:
    """The `state.json` of a finished checkpoint."""
    return RunState(**json.loads((checkpoint / _STATE).read_text(encoding="utf-8")))


class Checkpoints:
    """The checkpoints of one run; the last `keep` are kept. Saving and loading are collective."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._run_dir, self._keep = run_dir, keep

    def remove_leftovers(self) -> None:
        """Removes what a killed run has left half written or half removed. For one rank, before the first save."""
        for path in _entries(self._run_dir / FOLDER):
            if path.is_dir() and not _WHOLE.fullmatch(path.name):
                shutil.rmtree(path)

    def save(self, trained: Trained, state: RunState) -> None:
        """Writes a checkpoint, unless there is one of that step, and removes the oldest ones."""
        final = self._run_dir / FOLDER / f"step-{state.step:08}"
        partial = final.with_name(final.name + ".partial")
        with _failures(f"could not write the checkpoint {final}"):
            if _agreed(final.exists()):
                return
            if dist.get_rank() == 0:
                partial.mkdir(parents=True)
            dist.barrier()
            writer = dcp.FileSystemWriter(partial, sync_files=True)
            dcp.save(trained.state(dist.get_world_size()), storage_writer=writer)
            if dist.get_rank() == 0:
                (partial / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
                _sync_folder(partial)
                partial.rename(final)
                _sync(final.parent)
                self._remove_oldest()

    def load(self, trained: Trained, checkpoint: Path) -> RunState:
        """Puts the checkpoint into the model, the optimizer, the schedule and the random state of this rank."""
        saved = read_state(checkpoint)
        with _failures(f"could not read the checkpoint {checkpoint}"):
            state = trained.state(saved.ranks)
            dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint))
            trained.set_state(state)
        return saved

    def _remove_oldest(self) -> None:
        for path in list(whole_checkpoints(self._run_dir).values())[: -self._keep]:
            # Under its own name it would look whole if we were killed now.
            shutil.rmtree(path.rename(path.with_name(path.name + ".removed")))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _agreed(mine: bool) -> bool:
    """What rank 0 says: it alone renames, so others may see the folder earlier or later."""
    answer = torch.tensor([mine], dtype=torch.int64)
    dist.broadcast(answer, src=0)
    return bool(answer)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own internals
            yield
    except OSError as error:
        raise DistcaError(f"{what}: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise DistcaError(f"{what}: on rank {rank}: {cause}") from error


def _sync_folder(folder: Path) -> None:
    for path in [*_entries(folder), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
