"""The ranks that a command starts on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from typing import Any, TypeVar

import torch

from distca.connect.launch import StartMethod, launch, signals_blocked

Result = TypeVar("Result")


def start_ranks(fn: Callable[..., Result], *args: Any, ranks: int, imports: Sequence[str]) -> list[Result]:
    """`distca.launch` with ranks that are forked from one process, which has imported what all of them need.

    Imports take every rank seconds otherwise, and ranks share the cores of a machine. Where PyTorch knows GPUs, ranks
    are spawned: imports may ask CUDA something, and no fork of a process that did can use a GPU.

    Args:
        fn: an importable function.
        args: its arguments.
        ranks: number of processes.
        imports: the modules.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError, InvalidArgumentError, OperatingSystemError: as `distca.launch`.
    """
    return launch(fn, *args, ranks=ranks, start_method=_start_method(imports))


def _start_method(imports: Sequence[str]) -> StartMethod:
    if torch.version.cuda is not None:
        return "spawn"
    multiprocessing.set_forkserver_preload(["distca.apps.common.preloading", *imports])
    try:
        with signals_blocked(), _safe_path():
            forkserver.ensure_running()
    except OSError:  # its socket is a file in the folder for temporary files, whose path may be too long or forbidden
        return "spawn"
    return "forkserver"


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Processes that are started inside import nothing from the working directory, as the command itself does not."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"  # from Python 3.11 on
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
