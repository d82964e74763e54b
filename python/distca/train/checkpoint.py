"""Checkpoints of a run: everything that the next step depends on, written so that no kill can damage one.

A checkpoint is a folder `RUN/checkpoints/step-00000020` made by `torch.distributed.checkpoint`, every rank writing its
part: weights, optimizer, schedule and each rank's random state after that many steps, and `state.json` with the rest.
It is written under another name, synced to the disk and then renamed, so a folder of that name is whole; what a kill
leaves under other names is removed when the run goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LRScheduler

from distca.errors import DistcaError
from distca.train.config import ConfigError
from distca.train.files import read_object, why

FOLDER = "checkpoints"
_STATE = "state.json"
_WHOLE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says in `state.json`."""

    step: int  # steps taken; with the seed and the tokens of a step it is the position in the data
    ranks: int
    corpus: int  # fingerprint of the documents
    files: dict[str, list[int]] = field(default_factory=dict)  # the others in its folder: bytes and checksum


@dataclass
class Trained:
    """What training changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    saved: torch.nn.Module | None = None  # the part of the model whose names a checkpoint has, where not all of it
    clip_norm: float | None = None  # largest norm of the gradients

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
    """The `state.json` of a finished checkpoint. Raises ConfigError where it is not as a run leaves it."""
    path = checkpoint / _STATE
    values = read_object(path, _what_to_do(checkpoint))
    files = values.setdefault("files", {})  # of earlier versions
    numbers = {name: value for name, value in values.items() if name != "files"}
    if (
        sorted(numbers) != ["corpus", "ranks", "step"]
        or not isinstance(files, dict)
        or not all(isinstance(pair, list) and len(pair) == 2 for pair in files.values())
        or not all(type(number) is int for number in itertools.chain(numbers.values(), *files.values()))
    ):
        raise ConfigError(
            f"{path} holds {_short(values)}, must hold the integers step, ranks and corpus, and two of each of its "
            f"files; {_what_to_do(checkpoint)}"
        )
    return RunState(**values)


def check_whole(checkpoint: Path, step: int) -> None:
    """Raises ConfigError where the checkpoint of that step misses a file, or has one of another size."""
    state = read_state(checkpoint)
    if state.step != step:
        raise ConfigError(
            f"{checkpoint / _STATE} says that {state.step} steps were taken, its folder's name says {step}: it is of "
            f"another checkpoint; {_what_to_do(checkpoint)}"
        )
    for name, (size, _) in state.files.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, must have {size}"
            raise ConfigError(f"{path} {what}; {_what_to_do(checkpoint)}")


def check_content(checkpoint: Path, state: RunState) -> None:
    """Raises ConfigError where a file of the checkpoint is damaged."""
    for name, (_, checksum) in state.files.items():
        path = checkpoint / name
        if _checksum(path) != checksum:
            raise ConfigError(f"{path} is damaged: its checksum is another one; {_what_to_do(checkpoint)}")


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _what_to_do(checkpoint: Path) -> str:
    return f"restore it, or remove {checkpoint} to go on from the checkpoint before"


def _short(values: dict[str, Any]) -> str:
    text = json.dumps(values)
    return text if len(text) < 200 else text[:200] + " ..."


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
        """Writes a checkpoint, unless there is one of that step, and removes the oldest ones.

        Raises DistcaError on all ranks where one of them cannot write; what there is of the checkpoint is removed.
        """
        final = self._run_dir / FOLDER / f"step-{state.step:08}"
        partial = final.with_name(final.name + ".partial")
        if _agreed(final.exists()):
            return
        try:
            with _failures(f"could not write the checkpoint {final}", final):
                _on_rank_0(lambda: partial.mkdir(parents=True))
                dcp.save(trained.state(dist.get_world_size()), storage_writer=_Writer(partial, sync_files=True))
                _on_rank_0(lambda: self._finish(partial, final, state))
        except DistcaError as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            last = next(reversed(whole_checkpoints(self._run_dir).values()), None)
            whole = f"the last whole one is {last}" if last is not None else "there is no whole one"
            raise DistcaError(f"{error}; {whole}") from error

    def _finish(self, partial: Path, final: Path, state: RunState) -> None:
        files = {path.name: [path.stat().st_size, _checksum(path)] for path in _entries(partial)}
        content = json.dumps(asdict(replace(state, files=files)))
        (partial / _STATE).write_text(content + "\n", encoding="utf-8")
        _sync_folder(partial)
        partial.rename(final)
        _sync(final.parent)
        self._remove_oldest()

    def load(self, trained: Trained, checkpoint: Path) -> RunState:
        """Puts the checkpoint into the model, the optimizer, the schedule and the random state of this rank."""
        saved = read_state(checkpoint)
        with _failures(f"could not read the checkpoint {checkpoint}", None):
            _on_rank_0(lambda: check_content(checkpoint, saved))
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


def _on_rank_0(work: Callable[[], object]) -> None:
    """Does the work on rank 0 while the others wait; its error is raised on all ranks."""
    problem: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except (OSError, DistcaError) as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


class _Writer(dcp.FileSystemWriter):
    """Raises the system's error where torch raises one of its own because of it, which says less."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


@contextlib.contextmanager
def _failures(what: str, written: Path | None) -> Iterator[None]:
    """Raises DistcaError for what goes wrong. `written`: the checkpoint, unless it is read."""

    def reason(error: BaseException) -> str:
        return why(error, written) if written is not None and isinstance(error, OSError) else str(error)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own internals
            yield
    except OSError as error:
        raise DistcaError(f"{what}: {reason(error)}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise DistcaError(f"{what}: on rank {rank}: {reason(cause)}") from error


def _sync_folder(folder: Path) -> None:
    for path in [*_entries(folder), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
