"""Checkpoints of a run: everything that the next step depends on, written so that no kill can damage one.

A checkpoint is a folder `RUN/checkpoints/step-00000020`. `torch.distributed.checkpoint` makes it; every rank writes its
part. It holds weights, optimizer, schedule and each rank's random state after that many steps, and `state.json` with
the rest. `manifest.json` has the digests of the other files and is written last.

The folder is written under another name, synced to the disk and then renamed. Therefore a folder of that name is whole.
What a kill leaves under the other names is removed when the run goes on.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from distca.apps.common.files import read_object, sync, sync_folder, why
from distca.apps.train.manifest import (
    CheckpointError,
    Digests,
    check_digests,
    digest,
    read_manifest,
    what_to_do,
    write_manifest,
)
from distca.apps.train.unpickling import INDEX, Planner, Reader, read_index
from distca.errors import DistcaError

FOLDER = "checkpoints"
_STATE = "state.json"
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Every entry of the optimizer's state has the name of its parameter. Stages of a pipeline have different ones."""
_WHOLE = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(_WHOLE.pattern + r"\.(partial|removed)")

Result = TypeVar("Result")


@dataclass(frozen=True)
class RunState:
    """The content of a checkpoint's `state.json`."""

    step: int  # steps taken; with the seed and the tokens of a step it is the position in the data
    ranks: int
    corpus: int  # fingerprint of the documents


class SharedGradients(Protocol):
    """The gradients of a model that processes share."""

    def total_norm(self) -> float:
        """The norm of all of them together. It is collective."""

    def clip(self, largest: float) -> float:
        """Scales them down to this norm of all together. Returns the norm before."""


@dataclass
class Trained:
    """Everything that training changes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    saved: torch.nn.Module | None = None  # the module whose parameter names a checkpoint has, if it is not `model`
    clip_norm: float | None = None  # largest norm of the gradients
    shared: SharedGradients | None = None  # of a model that processes share; None if each has all of it
    dtype: torch.dtype = torch.float32  # of attention and matrix products

    def total_norm(self) -> float:
        """The norm of all gradients together, the same on every rank."""
        if self.shared is not None:
            return self.shared.total_norm()
        return _number(get_total_norm([one.grad for one in self.model.parameters() if one.grad is not None]))

    def clip(self) -> float | None:
        """Clips the gradients. Returns their norm before; None if the run does not clip."""
        if self.clip_norm is None:
            return None
        if self.shared is not None:
            return self.shared.clip(self.clip_norm)
        return _number(clip_grad_norm_(self.model.parameters(), self.clip_norm))

    def state(self, saved_ranks: int) -> dict[str, Any]:
        """The state by name, for `torch.distributed.checkpoint`. Ranks below `saved_ranks` add their random state."""
        model, optimizer = get_state_dict(self.saved or self.model, self.optimizer, options=_BY_NAME)
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
            options=_BY_NAME,
        )
        schedule = self.schedule
        schedule.load_state_dict(state["schedule"])
        if isinstance(schedule, LambdaLR):  # the rate that was saved is of the schedule over the steps of before
            for group, rate, factor in zip(
                self.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
            ):
                group["lr"] = rate * factor(schedule.last_epoch)
        if (random := state.get(_random_key())) is not None:
            torch.set_rng_state(random)


def _number(norm: torch.Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _random_key() -> str:
    return f"random/{dist.get_rank()}"


def whole_checkpoints(run_dir: Path) -> dict[int, Path]:
    """The finished checkpoints of a run by their numbers of steps, in ascending order."""
    folder = run_dir / FOLDER
    found = [(match, path) for path in _entries(folder) if (match := _WHOLE.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found))


def read_state(checkpoint: Path) -> RunState:
    """The `state.json` of a finished checkpoint. Raises CheckpointError if it is not as a run leaves it."""
    path = checkpoint / _STATE
    values = read_object(path, what_to_do(checkpoint))
    values.pop("files", None)  # checkpoints of versions without a manifest have it
    if sorted(values) != ["corpus", "ranks", "step"] or any(type(value) is not int for value in values.values()):
        raise CheckpointError(
            f"{path} holds {_short(values)}, must hold the integers step, ranks and corpus; {what_to_do(checkpoint)}"
        )
    return RunState(**values)


def check_whole(checkpoint: Path, step: int) -> None:
    """Raises CheckpointError unless the checkpoint is of that step and has its manifest's files, in their sizes."""
    check_digests(checkpoint, read_manifest(checkpoint), [_STATE])
    state = read_state(checkpoint)
    if state.step != step:
        raise CheckpointError(
            f"{checkpoint / _STATE} says that {state.step} steps were taken, its folder's name says {step}: it is of "
            f"another checkpoint; {what_to_do(checkpoint)}"
        )


def _short(values: dict[str, Any]) -> str:
    text = json.dumps(values)
    return text if len(text) < 200 else text[:200] + " ..."


class Checkpoints:
    """The checkpoints of one run, of which the last `keep` are kept. Saving and loading are collective."""

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._run_dir, self._keep = run_dir, keep

    def remove_leftovers(self) -> None:
        """Removes what a killed run left half written or half removed. One rank calls it, before the first save."""
        for path in _entries(self._run_dir / FOLDER):
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)

    def save(self, trained: Trained, state: RunState) -> None:
        """Writes a checkpoint, unless there is one of that step, and removes the oldest ones.

        Raises:
            DistcaError: on all ranks, if one of them cannot write. What there is of the checkpoint is then removed.
        """
        final = self._run_dir / FOLDER / f"step-{state.step:08}"
        partial = final.with_name(final.name + ".partial")
        if _agreed(final.exists()):
            return
        try:
            with _failures(f"could not write the checkpoint {final}", final):
                on_rank_0(lambda: partial.mkdir(parents=True))
                writer = _Writer(partial, sync_files=True)
                dcp.save(trained.state(dist.get_world_size()), storage_writer=writer)
                digests = dict(collections.ChainMap(*_gathered(writer.digests)))
                on_rank_0(lambda: self._finish(partial, final, state, digests))
        except DistcaError as error:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            last = next(reversed(whole_checkpoints(self._run_dir).values()), None)
            whole = f"the last whole one is {last}" if last is not None else "there is no whole one"
            raise DistcaError(f"{error}; {whole}") from error

    def _finish(self, partial: Path, final: Path, state: RunState, digests: Digests) -> None:
        (partial / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
        write_manifest(partial, digests | {name: digest(partial / name) for name in (INDEX, _STATE)})
        sync_folder(partial)
        partial.rename(final)
        sync(final.parent)
        self._remove_oldest()

    def load(self, trained: Trained, checkpoint: Path) -> RunState:
        """Puts the checkpoint into the model, the optimizer, the schedule and the random state of this rank.

        Raises:
            CheckpointError: on all ranks, if a file of the checkpoint is damaged.
        """
        with _failures(f"could not read the checkpoint {checkpoint}", None):
            digests = _on_all_ranks(lambda: _checked(checkpoint))
            sizes = {name: size for name, (size, _) in digests.items()}
            saved, index = _on_all_ranks(lambda: (read_state(checkpoint), read_index(checkpoint, sizes)))
            state = trained.state(saved.ranks)
            dcp.load(state, storage_reader=Reader(checkpoint, index), planner=Planner())
            trained.set_state(state)
        return saved

    def _remove_oldest(self) -> None:
        for path in list(whole_checkpoints(self._run_dir).values())[: -self._keep]:
            # Under its own name it would look whole if a kill came now.
            shutil.rmtree(path.rename(path.with_name(path.name + ".removed")))


def load_model(checkpoint: Path, state: dict[str, torch.Tensor]) -> None:
    """Puts the weights of a checkpoint into tensors by their names. This process alone does so and checks all files."""
    digests = read_manifest(checkpoint)
    check_digests(checkpoint, digests, digests)
    index = read_index(checkpoint, {name: size for name, (size, _) in digests.items()})
    with _failures(f"could not read the checkpoint {checkpoint}", None):
        dcp.load({"model": state}, storage_reader=Reader(checkpoint, index), planner=Planner(), no_dist=True)


def _checked(checkpoint: Path) -> Digests:
    """Returns the manifest after this rank has compared its share of the files: every n-th, from large to small."""
    digests = read_manifest(checkpoint)
    names = sorted(digests, key=lambda name: digests[name][0], reverse=True)
    check_digests(checkpoint, digests, names[dist.get_rank() :: dist.get_world_size()])
    return digests


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _agreed(mine: bool) -> bool:
    """Rank 0's answer on all ranks. Rank 0 alone renames; others may see the folder earlier or later."""
    answer = torch.tensor([mine], dtype=torch.int64)
    dist.broadcast(answer, src=0)
    return bool(answer)


def on_rank_0(work: Callable[[], object]) -> None:
    """Does the work on rank 0 while the others wait. All ranks raise its error."""
    problem: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except (OSError, DistcaError) as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def _on_all_ranks(work: Callable[[], Result]) -> Result:
    """Does the work on every rank. All ranks raise the error of the first rank that has one."""
    problem: Exception | None = None
    try:
        result = work()
    except (OSError, DistcaError) as error:
        problem = error
    for theirs in _gathered(problem):
        if theirs is not None:
            raise theirs
    return result


def _gathered(mine: Result) -> list[Result]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class _Writer(dcp.FileSystemWriter):
    """A writer that raises the system's error where torch would raise one of its own, which says less.

    Attributes:
        digests: digests of the files that this rank has written.
    """

    digests: Digests

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            written = super().write_data(plan, planner)
            mine = Path(self.path).glob(f"{plan.storage_data.prefix}*")
            self.digests = {path.name: digest(path) for path in mine}
            return written
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


@contextlib.contextmanager
def _failures(what: str, written: Path | None) -> Iterator[None]:
    """Raises DistcaError for what goes wrong inside. `written` is the checkpoint; it is None if one is read."""

    def reason(error: BaseException) -> str:
        return why(error, written) if written is not None and isinstance(error, OSError) else str(error)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about its own internals
            yield
    except OSError as error:
        raise DistcaError(f"{what}: {reason(error)}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise DistcaError(f"{what}: on rank {rank}: {reason(cause)}") from error
