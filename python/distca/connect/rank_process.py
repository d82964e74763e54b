"""A process that `launch` has started for one rank: it joins the group, calls the function, and reports to its parent.

A rank dies with its parent. It sends its parent either what the function returned or the exception that ended it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distca.connect.collections_paused import collections_paused
from distca.errors import (
    ContextPoisonedError,
    DistcaError,
    InvalidArgumentError,
    PeerDiedError,
    PeerLeftError,
    PeerTimeoutError,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
#: Signals that ask a program to end.
ENDING = {signal.SIGINT, signal.SIGTERM}
#: What a user chooses glibc's thresholds with.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


@dataclass
class Failure:
    """The exception that ended a rank, as the rank reports it. `when` is on the clock that all processes share."""

    exception: str
    text: str
    details: str
    when: float
    expected: bool = False
    follow_up: bool = False  # the echo of another rank's failure
    interrupted: bool = False
    mistake: bool = False  # of an argument

    @staticmethod
    def of(error: BaseException) -> Failure:
        try:
            text = str(error)
        except Exception as unreadable:  # the exception is of the user's own type
            text = f"(its text cannot be read: {type(unreadable).__name__})"
        of_another = PeerDiedError | PeerLeftError | PeerTimeoutError | ContextPoisonedError | dist.DistError
        echo = isinstance(error, of_another) or (
            isinstance(error, RuntimeError) and "gloo" in text and not isinstance(error, DistcaError)
        )
        return Failure(
            type(error).__name__,
            text,
            "".join(traceback.format_exception(error)).rstrip(),
            time.monotonic(),
            expected=isinstance(error, DistcaError),
            follow_up=echo,
            interrupted=isinstance(error, KeyboardInterrupt),
            mistake=isinstance(error, InvalidArgumentError),
        )


@dataclass
class Success:
    """What the function of a rank returned."""

    value: Any


def rank_main(
    call: bytes, rank: int, ranks: int, threads: int, port: int, environment: dict[str, str], pipe: Connection
) -> None:
    """Calls the pickled function and arguments `call` on this rank of a new group, and reports through `pipe`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a fork server's are not blocked, for it may fork others too
    _die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # keeps what is imported by now out of garbage collections
    atexit.register(gc.unfreeze)  # nanobind, which Triton brings, would report it as leaked
    keep_freed_memory()
    _name_process(f"distca-rank-{rank}")
    os.setpgid(0, 0)  # a Ctrl-C at the terminal reaches the parent alone, which passes it on exactly once
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # outside the terminal's process group, printing must not stop us
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _join_group(rank, ranks, threads, port)
        # Gloo's threads keep these blocked: if one of them took one, this thread would stay asleep.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        with collections_paused():
            fn, args = pickle.loads(call)
        value = fn(*args)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank that has returned is not interrupted any more
        fn = args = None
        _send_value(pipe, value)
    except BaseException as error:
        _report_and_exit(pipe, error)
    try:
        leave_process_group()
    except Exception:  # a peer failed meanwhile, and the parent knows why
        exit_now(1)


def _join_group(rank: int, ranks: int, threads: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def keep_freed_memory() -> None:
    """Has glibc keep memory that is freed, unless a variable of the environment sets its thresholds.

    Tensors of up to 32 MiB then take memory that the process has already. Otherwise every step pays for page faults.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not any(name in os.environ for name in _MALLOC_VARIABLES):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def leave_process_group() -> None:
    """Ends `torch.distributed` in this process, together with all other ranks.

    Everything that holds the group (DDP, optimizers over it) must have been dropped before, because gloo aborts a
    process that exits while a process group is alive.
    """
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _send_value(pipe: Connection, value: Any) -> None:
    try:
        message = pickle.dumps(Success(value))
    except Exception as error:
        raise InvalidArgumentError(f"launch: the returned {type(value).__name__} cannot be pickled: {error}") from error
    pipe.send_bytes(message)


def _report_and_exit(pipe: Connection, error: BaseException) -> NoReturn:
    message = pickle.dumps(Failure.of(error))
    with contextlib.suppress(OSError):  # the parent is gone
        pipe.send_bytes(message)
    exit_now(1)


def exit_now(code: int) -> NoReturn:
    """Exits without destructors. What failed may hold a process group, which would make gloo abort.

    What cannot be written to stdout or stderr is a failure. A stream that was closed before the program began is None.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def _die_with_parent() -> None:
    """Makes this process die with its parent: the launching program, or the fork server, which dies with it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork server ends when nobody holds this end of a pipe any more, and gives it to each process that it forks.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # the parent ended before the line above took effect
        os._exit(1)


def _name_process(name: str) -> None:
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
