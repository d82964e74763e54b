"""The command of `pretrain_llama.py`: reads options, and runs as one rank of a launcher or starts ranks of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.apps.common import memory_log
from distca.apps.common.options import INTERRUPTED, exit_code, interrupt_on_sigterm
from distca.apps.common.ranks import start_ranks
from distca.apps.common.run_lock import LOCK, locked
from distca.apps.pretrain.options import Options, parse
from distca.apps.pretrain.shapes import shape_of
from distca.connect.launch import RankError
from distca.connect.rank_process import Failure, exit_now, leave_process_group
from distca.errors import DistcaError, InvalidArgumentError
from distca.trace import nsys
from distca.trace.nsys import switched_on

LOGS = Path("logs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a mistake in the options, 130 if the run was stopped.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        _check_packages(options)
        _check_variables()
        _take_slurm_ranks()
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _as_rank(options)
        return _with_own_ranks(options)
    except KeyboardInterrupt:
        print("pretrain_llama: interrupted", file=sys.stderr)
        return INTERRUPTED
    except DistcaError as error:
        message = error.headline if isinstance(error, RankError) and (error.expected or not error.exception) else error
        print(f"pretrain_llama: error: {message}", file=sys.stderr)
        return exit_code(error)


def _check_packages(options: Options) -> None:
    needed = {"megatron": "--no-deps 'megatron-core>=0.16,<0.20'", "numpy": "numpy", "tqdm": "tqdm"}
    if options.tokenizer is not None:
        needed["transformers"] = "transformers"
    if options.ping_pong or options.compare:
        needed["greenlet"] = "greenlet"
    for package, install in needed.items():
        if importlib.util.find_spec(package) is None:
            raise InvalidArgumentError(f"the package {package} is not installed: pip install {install}")


def _check_variables() -> None:
    switched_on(memory_log.VARIABLE)
    if switched_on(nsys.VARIABLE) and not torch.cuda.is_available():
        raise InvalidArgumentError(f"{nsys.VARIABLE} is 1, which needs a GPU: there is none here")


def _take_slurm_ranks() -> None:
    """Under srun, sets the variables of torch.distributed from those of Slurm. The address comes from the script."""
    if "SLURM_STEP_ID" not in os.environ or "RANK" in os.environ:
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        if os.environ.get("SLURM_NTASKS", "1") == "1":
            return
        raise InvalidArgumentError(
            "pretrain_llama.py is a task of srun, and MASTER_ADDR and MASTER_PORT are not set: start it by "
            "pretrain_llama.sh, which sets them, or export them"
        )
    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}
    os.environ.update({name: os.environ[f"SLURM_{of_slurm}"] for name, of_slurm in names.items()})


def _say_first(options: Options, world_size: int, cuda: bool) -> None:
    data = world_size // (options.tp_size * options.pp_size)
    where = torch.cuda.get_device_name() if cuda else "no GPU here, therefore CPU ranks"
    shares = f"data {data // options.cp_size} x tensor {options.tp_size} x pipeline {options.pp_size}"
    shares += f" x context {options.cp_size}" if options.cp_size > 1 else ""
    shares += f" x {options.vpp_size} chunks" if options.vpp_size > 1 else ""
    print(f"pretrain_llama: {where}; {options.model}, attention by {options.attention}, {world_size} ranks: {shares}")
    print("options: " + " ".join(f"{name.upper()}={value}" for name, value in options.as_json().items()), flush=True)


def _with_own_ranks(options: Options) -> int:
    """Starts CPU ranks on this machine."""
    if torch.cuda.is_available():
        raise InvalidArgumentError(
            "pretrain_llama.py is one rank of a launcher where there are GPUs: start it by `bash pretrain_llama.sh`, "
            "torchrun or srun"
        )
    world_size = options.ranks or max(2, options.tp_size * options.pp_size * options.cp_size)
    resolved = options.resolved(cuda=False, world_size=world_size)
    shape_of(resolved)
    with _run_folder(resolved) as run_dir:
        _say_first(resolved, world_size, cuda=False)
        interrupt_on_sigterm()
        stopped = start_ranks(_rank, resolved, run_dir, ranks=world_size, imports=["distca.apps.pretrain.train"])
    return INTERRUPTED if stopped[0] else 0


def _as_rank(options: Options) -> int:
    """Runs as one of the ranks that srun or torchrun has started."""
    cuda, world_size = torch.cuda.is_available(), int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    try:
        resolved = options.resolved(cuda=cuda, world_size=world_size)
        shape_of(resolved)
    except InvalidArgumentError:
        if rank == 0:
            raise
        return 2  # rank 0 has the same options, and says so
    try:
        if cuda:
            # Slurm may show a task its own GPU alone.
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        with _run_folder(resolved) if rank == 0 else contextlib.nullcontext() as run_dir:
            told: list[Any] = [run_dir]
            dist.broadcast_object_list(told, src=0)
            if rank == 0:
                _say_first(resolved, world_size, cuda)
            _rank(resolved, told[0])
            leave_process_group()
        return 0  # also if it was stopped: another exit code would make the launcher kill ranks that are still ending
    except BaseException as error:
        exit_now(_tell(error, rank))


def _tell(error: BaseException, rank: int) -> int:
    """Prints why this rank ends, and returns the exit code."""
    failure = Failure.of(error)
    if not failure.expected:
        print(failure.details, file=sys.stderr)
    echo = "follows another rank's failure: " if failure.follow_up else ""
    first = failure.text.strip().split("\n")[0]
    print(f"pretrain_llama: rank {rank} on {socket.gethostname()}: {echo}{failure.exception}: {first}", file=sys.stderr)
    return 2 if isinstance(error, InvalidArgumentError) else 1


def _rank(options: Options, run_dir: Path) -> bool:
    from distca.apps.pretrain.train import train

    return train(options, run_dir)


@contextlib.contextmanager
def _run_folder(options: Options) -> Iterator[Path]:
    """The folder of the run, made if need be and locked. A new one in which the run then writes nothing is removed."""
    with contextlib.ExitStack() as stack:
        try:
            run_dir, is_new = _made(options)
            stack.enter_context(locked(run_dir))
        except OSError as error:
            where = options.run_dir or LOGS
            raise InvalidArgumentError(
                f"--run-dir (RUN_DIR) is {where}, where nothing can be written: {error}"
            ) from error
        try:
            yield run_dir
        finally:
            if is_new and [path.name for path in run_dir.iterdir()] == [LOCK]:
                shutil.rmtree(run_dir)


def _made(options: Options) -> tuple[Path, bool]:
    """The folder of the run, and whether it is new."""
    job = os.environ.get("SLURM_JOB_ID")
    named = options.run_dir or (LOGS / f"pretrain-{job}" if job else None)
    if named is not None:
        is_new = not named.exists()
        named.mkdir(parents=True, exist_ok=True)
        return named, is_new
    first = LOGS / time.strftime("pretrain-%Y%m%d-%H%M%S")
    number, run_dir = 1, first
    while True:
        try:
            run_dir.mkdir(parents=True)
            return run_dir, True
        except FileExistsError:  # of a run that began in the same second
            number += 1
            run_dir = first.with_name(f"{first.name}-{number}")
