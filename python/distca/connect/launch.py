"""`distca.launch(fn, *args, ranks=N)`: starts the ranks of one job on this machine.

Each rank is a process of its own in which `torch.distributed` is initialised over gloo on the loopback interface.
Processes are spawned by default; therefore `fn` must be importable. The rendezvous is a store that the parent owns, on
a port that the kernel chose: there are no port races and no files. Ranks die with their parent, and a rank that fails
ends the others. This module is the parent's side; `rank_process` is that of a rank.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist

from distca.arguments import is_whole
from distca.connect.open_files import check_open_files
from distca.connect.rank_process import ENDING, Failure, Success, rank_main
from distca.errors import DistcaError, InvalidArgumentError, OperatingSystemError

Result = TypeVar("Result")
StartMethod = Literal["spawn", "forkserver"]

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
KNOWN_GRACE_SECONDS = 1.0
"""How long they may take once the first cause is known: a rank died, or told an error that echoes no other rank's."""
_WAKE_SECONDS = 0.5


class RankError(DistcaError):
    """A rank started by `launch` failed. The message names the rank and the cause, with the traceback of an exception.

    Attributes:
        rank: the rank.
        headline: the message without the traceback.
        exception: the name of the exception type that the rank raised; empty if it died without one.
        expected: whether that exception is one of distca's own errors.
        mistake: whether it is an InvalidArgumentError.
    """

    def __init__(
        self,
        rank: int,
        headline: str,
        details: str = "",
        exception: str = "",
        expected: bool = False,
        mistake: bool = False,
    ) -> None:
        super().__init__(f"{headline}\n\n{details}" if details else headline)
        self.rank = rank
        self.headline = headline
        self.exception = exception
        self.expected = expected
        self.mistake = mistake


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: SpawnProcess | ForkServerProcess
    pipe: Connection
    report: Failure | Success | None = None
    ended_at: float | None = None
    stopped_by_us: bool = field(default=False)

    @property
    def running(self) -> bool:
        return self.ended_at is None

    @property
    def failed(self) -> bool:
        return isinstance(self.report, Failure) or (not self.running and self.process.exitcode != 0)

    def receive(self) -> None:
        """Takes the report out of the pipe if there is one. A rank may also die without a report."""
        try:
            if self.report is not None or not self.pipe.poll():
                return
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            self.report = pickle.loads(message)
        except Exception as error:
            self.report = Failure.of(InvalidArgumentError(f"launch: the returned value cannot be unpickled: {error}"))

    def signal(self, number: int) -> None:
        if self.running and self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and the fork server has reaped it
                os.kill(self.process.pid, number)


def launch(
    fn: Callable[..., Result],
    *args: Any,
    ranks: int,
    threads: int | None = None,
    start_method: StartMethod = "spawn",
) -> list[Result]:
    """Calls `fn(*args)` in `ranks` new processes and returns their results in the order of the ranks.

    In each process `torch.distributed` is initialised (gloo, on the loopback interface unless GLOO_SOCKET_IFNAME says
    otherwise), and RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set. The calling script needs an `if __name__
    == "__main__":` guard, as with every spawned process.

    Ctrl-C is passed on to every rank once. There it raises KeyboardInterrupt unless `fn` handles it. If all ranks
    return, so does `launch`; otherwise it raises KeyboardInterrupt. A second Ctrl-C kills the ranks.

    Args:
        fn: an importable function.
        args: its arguments. `fn`, `args` and the returned values are pickled; keep them small.
        ranks: number of processes.
        threads: threads of torch in each process; by default the cores that this process may use, divided by
            `ranks`.
        start_method: `"spawn"`, or `"forkserver"` for programs that launch often and without a GPU, such as tests. The
            first such launch starts one process, which imports what `multiprocessing.set_forkserver_preload` names.
            Ranks are forked from it, which saves each of them the seconds of those imports. Forked ranks run no
            functions of `atexit`.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: a rank failed. It names the rank that failed first, and why. The others get a second to end by
            themselves, or a few while the cause is not known, and are then killed.
        InvalidArgumentError: an argument is out of range or cannot be pickled, or `fn` cannot be imported.
        OperatingSystemError: the ranks take more open files than this process may have, or the process from which
            they would be forked has ended.
    """
    if not is_whole(ranks, 1):
        raise InvalidArgumentError(f"launch: ranks is {ranks!r}, must be an integer from 1 on")
    threads = threads if threads is not None else max(1, len(os.sched_getaffinity(0)) // ranks)
    if not is_whole(threads, 1):
        raise InvalidArgumentError(f"launch: threads is {threads!r}, must be an integer from 1 on")
    if start_method not in get_args(StartMethod):
        raise InvalidArgumentError(
            f"launch: start_method is {start_method!r}, must be one of {', '.join(get_args(StartMethod))}"
        )
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"launch: {getattr(fn, '__qualname__', fn)!s} and its arguments must be picklable, "
            f"and the function importable (defined at the top level of a module): {error}"
        ) from error

    if getattr(fn, "__module__", None) == "__main__" and not _main_is_importable():
        raise InvalidArgumentError(
            f"launch: {getattr(fn, '__qualname__', fn)!s} is defined where other processes cannot import it from: in "
            "an interactive session, a notebook, -c, stdin or a __main__.py; import it from a module"
        )

    check_open_files(f"launch: {ranks} rank{'s' * (ranks > 1)}", 16 + 4 * ranks)
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    except OSError as error:
        raise OperatingSystemError(f"launch: no port on the loopback interface, 127.0.0.1: {error}") from error
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    group: list[_Rank] = []
    with _exits_told():
        try:
            _start(group, call, ranks, threads, port, start_method)
            interrupted = _supervise(group)
            return _outcome(group, interrupted)
        finally:
            for rank in group:
                rank.signal(signal.SIGKILL)
            for rank in group:
                rank.process.join()
                rank.process.close()
                rank.pipe.close()
            del store


def _main_is_importable() -> bool:
    """Whether processes that are started find what the program's main module defines."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # multiprocessing imports no __main__.py
        return spec.name != "__main__" and not spec.name.endswith(".__main__")
    return os.path.isfile(getattr(main, "__file__", None) or "")


def _start(group: list[_Rank], call: bytes, ranks: int, threads: int, port: int, start_method: StartMethod) -> None:
    context: Any = multiprocessing.get_context(start_method)
    environment = dict(os.environ)  # a fork server would have the environment in which it was started
    if start_method == "forkserver":
        # With signals as they are: it forks the program's other processes too, and these must end when they are told.
        _told(forkserver.ensure_running)
    with signals_blocked():
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(call, rank, ranks, threads, port, environment, sender), name=f"rank {rank}"
            )
            _told(process.start)
            sender.close()
            group.append(_Rank(rank, process, receiver))


@contextlib.contextmanager
def _exits_told() -> Iterator[None]:
    """Where SIGCHLD is ignored, as it may be inherited, the system tells no parent how its children ended."""
    ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _told(start: Callable[[], None]) -> None:
    """Starts a process. Raises OperatingSystemError if it cannot be started."""
    try:
        start()
    except (EOFError, ConnectionError) as error:
        raise OperatingSystemError(
            f"launch: the process that ranks are forked from has ended ({error}); what it wrote to stderr says "
            "why, often an import that failed"
        ) from error
    except OSError as error:
        raise OperatingSystemError(f"launch: a process cannot be started: {error}") from error


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM, also in processes that are started inside.

    A rank unblocks them once it has joined the group; what comes earlier waits until then. A fork server that commands
    start keeps them blocked: a signal for all processes must not end the ranks with it.
    """
    resource_tracker.ensure_running()  # to start it inside would unblock signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _supervise(group: list[_Rank]) -> bool:
    """Waits until every rank has ended. Returns whether Ctrl-C was pressed meanwhile."""
    interrupts = 0
    deadline: float | None = None
    known = False
    while any(rank.running for rank in group):
        try:
            _collect(group, deadline)
            if deadline is None and any(rank.failed for rank in group):
                deadline = time.monotonic() + GRACE_SECONDS
            if not known and any(rank.failed and key[0] == 0 for rank in group if (key := _failure_key(rank))):
                known, deadline = True, min(deadline or math.inf, time.monotonic() + KNOWN_GRACE_SECONDS)
            if deadline is not None and time.monotonic() > deadline:
                for rank in group:
                    rank.stopped_by_us |= rank.running and rank.process.is_alive()
                    rank.signal(signal.SIGKILL)
        except KeyboardInterrupt:
            interrupts += 1
            for rank in group:
                rank.stopped_by_us |= rank.running and interrupts > 1
                rank.signal(signal.SIGINT if interrupts == 1 else signal.SIGKILL)
    return interrupts > 0


def _collect(group: list[_Rank], deadline: float | None) -> None:
    """Waits for news of any rank, for a while or until the deadline, and takes it in."""
    waiting: list[Any] = [rank.process.sentinel for rank in group if rank.running]
    waiting += [rank.pipe for rank in group if rank.running and rank.report is None]
    # If another thread gets the Ctrl-C (torch's store has one), it does not wake this thread: look now and then.
    timeout = _WAKE_SECONDS if deadline is None else min(_WAKE_SECONDS, max(0.0, deadline - time.monotonic()) + 0.01)
    ready = wait(waiting, timeout)
    for rank in group:
        if rank.pipe in ready:
            rank.receive()
        # A process that the rank has forked, and that outlives it, keeps the sentinel open.
        if rank.running and (rank.process.sentinel in ready or not rank.process.is_alive()):
            rank.receive()
            rank.process.join()
            rank.ended_at = time.monotonic()


def _outcome(group: list[_Rank], interrupted: bool) -> list[Any]:
    """The values of all ranks. Raises the error of the rank that failed first if one failed."""
    failures = [(key, rank) for rank in group if (key := _failure_key(rank)) is not None]
    if interrupted and any(not isinstance(rank.report, Success) for rank in group):
        raise KeyboardInterrupt
    if not failures:
        return [rank.report.value for rank in group if isinstance(rank.report, Success)]
    failures.sort(key=lambda entry: entry[0])
    _, first = failures[0]
    others = "".join(f"\nrank {rank.rank} then ended: {_headline(rank)}" for _, rank in failures[1:])
    report = first.report
    if isinstance(report, Failure) and report.interrupted:
        raise KeyboardInterrupt
    headline = f"rank {first.rank} of {len(group)} {_headline(first)}"
    if isinstance(report, Failure):
        details = report.details + others
        raise RankError(first.rank, headline, details, report.exception, report.expected, report.mistake)
    raise RankError(first.rank, headline, others.strip())


def _failure_key(rank: _Rank) -> tuple[int, float] | None:
    """Sorts failures by cause, then by time: ranks that we stopped or that echo another's failure come last."""
    if isinstance(rank.report, Failure):
        return (2 if rank.report.interrupted else int(rank.report.follow_up), rank.report.when)
    if rank.process.exitcode == 0 and rank.report is not None:
        return None
    late = rank.stopped_by_us or rank.report is not None
    return (3 if late else 0, rank.ended_at or 0.0)


def _headline(rank: _Rank) -> str:
    if isinstance(rank.report, Failure):
        return f"failed: {rank.report.exception}: {rank.report.text}"
    code = rank.process.exitcode
    returned = rank.report is not None
    after = " after its function had returned" if returned else ""
    if rank.stopped_by_us:
        return "did not end by itself after another rank's failure and was killed"
    if code is not None and code < 0:
        return f"was killed by {_signal_name(-code)}{after}"
    if code == 0:
        return "exited with code 0 without returning from its function"
    if returned:
        return (
            f"exited with code {code}{after}, because the ranks could not leave torch.distributed together; often an "
            "earlier error of a collective, such as a timeout of distca.init, was caught"
        )
    return (
        f"exited with code {code} before its function returned; if it could not start, check that the calling script "
        "has an `if __name__ == '__main__':` guard"
    )


def _signal_name(number: int) -> str:
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
