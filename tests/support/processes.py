"""Ranks as real processes that a test can kill, stop and watch, without a process group or a port.

A `Group` has a leader, which is forked from a server that has already imported torch. The leader forks the ranks, so
that a group takes tens of milliseconds. Where the kernel allows it, the group lives in namespaces of its own: its
abstract sockets are listed apart from all others, its /dev/shm is tiny, and it can only read /tmp. What the group
leaves behind can then be told from everything else on the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import distca
from distca import _C
from distca.planner.cost import CostModel
from distca.testing import _emulation
from support.gpus import no_gpu

LIMIT = 20.0 if no_gpu() else 120.0
"""The seconds after which a test gives up on a process that should have answered. Everything here takes far less. On a
GPU a process begins CUDA first, and the ranks take turns. It counts in the test's own process alone.
"""

HEADS = distca.Heads(q=2, kv=1, dim=8)

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


# The server imports these, so that its forks need not (see also ranks.py). Otherwise torch imports the last one at the
# first backward, which takes half a second.
multiprocessing.set_forkserver_preload(["distca.apps.common.preloading", "torch.fx.experimental.symbolic_shapes"])


@functools.cache
def _processes() -> Any:
    """The context of the server, which has imported everything when this returns. Therefore no test's time limit counts
    the imports.
    """
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


# ---- in the test


@dataclass
class Left:
    """What the ranks have left behind: what is there once they have ended and was not there before."""

    processes: list[str]
    files: list[str]
    sockets: list[str]

    def nothing(self) -> bool:
        return not (self.processes or self.files or self.sockets)


class Group:
    """Runs `program(rank, ranks, pipe, *args)` in `ranks` processes. Use it in `with`.

    With `network` the ranks can reach the test's ports, and the group has no namespaces of its own. Then only processes
    are looked for afterwards, because files and sockets may be anybody's.
    """

    def __init__(
        self,
        program: Callable[..., None],
        ranks: int,
        *args: Any,
        shm: str | None = "size=64k",
        expect_left: bool = False,
        network: bool = False,
    ) -> None:
        context = _processes()
        pairs = [context.Pipe() for _ in range(ranks)]
        self._news, theirs = context.Pipe()
        self._pipes: list[Connection] = [mine for mine, _ in pairs]
        self._leader = context.Process(
            target=_lead, args=(program, args, [pipe for _, pipe in pairs], theirs, shm, network), daemon=True
        )
        self._leader.start()
        for pipe in (*(pipe for _, pipe in pairs), theirs):
            pipe.close()
        self._exits: dict[int, int] = {}
        self._expect_left = expect_left
        self.left: Left | None = None
        self.pids: list[int] = []
        self._stacks = Path(os.devnull)
        self.refusal: str = self._told()
        """The reason why the group has no namespaces of its own; empty if it has."""
        self.pids, stacks = self._told()
        self._stacks = Path(f"/proc/{self._leader.pid}/fd/{stacks}")

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends what still runs. Without an error in the test, the ranks must end by themselves and leave nothing."""
        try:
            if error is None:
                for rank in range(len(self.pids)):
                    self.exit_code(rank)
                self.left = self._told()
        finally:
            for pipe in self._pipes:
                pipe.close()
            for rank in range(len(self.pids)):
                self.signal(rank, signal.SIGKILL)
            self._leader.join(LIMIT)
            self._leader.kill()
            self._leader.join()
            self._news.close()
        if error is None and not self._expect_left:
            assert self.left is not None
            assert self.left.nothing(), self.left

    def send(self, rank: int, message: Any) -> None:
        self._pipes[rank].send(message)

    def tell(self, message: Any, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.pids)) if ranks is None else ranks:
            self.send(rank, message)

    def receive(self, rank: int) -> Any:
        """The next message of a rank. Raises EOFError if the rank has ended, and AssertionError if it is silent."""
        assert self._pipes[rank].poll(LIMIT), f"rank {rank} was silent for {LIMIT:g} seconds\n{self.stacks()}"
        return self._pipes[rank].recv()

    def stacks(self) -> str:
        """Where all threads of the ranks, and of their children, are. A stopped process says nothing."""
        for pid in self.pids:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            for one in (pid, *map(int, children.read_text().split() if children.exists() else ())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGUSR1)
                time.sleep(0.2)  # one after the other, for they share a file
        with contextlib.suppress(OSError):  # the leader has ended
            return self._stacks.read_text()
        return ""

    def exchange_addresses(self) -> None:
        """Sends every rank the addresses of all: the counterpart of `connect` in the ranks."""
        self.tell([self.receive(rank) for rank in range(len(self.pids))])

    def signal(self, rank: int, number: int) -> None:
        if rank not in self._exits:
            try:
                os.kill(self.pids[rank], number)
            except ProcessLookupError:
                return

    def kill(self, rank: int) -> None:
        """Kills a rank by SIGKILL and waits until its process is gone."""
        self.signal(rank, signal.SIGKILL)
        assert self.exit_code(rank) == -signal.SIGKILL

    def exit_code(self, rank: int) -> int:
        while rank not in self._exits:
            one, code = self._told()
            self._exits[one] = code
        return self._exits[rank]

    def _told(self) -> Any:
        assert self._news.poll(LIMIT), f"no news of the ranks for {LIMIT:g} seconds\n{self.stacks()}"
        return self._news.recv()


# ---- in the leader


def _lead(
    program: Callable[..., None],
    args: tuple[Any, ...],
    pipes: list[Connection],
    news: Connection,
    shm: str | None,
    network: bool,
) -> None:
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    refusal = "its ranks use the network" if network else _isolate(shm)
    news.send(refusal)
    before = _traces(everything=not refusal)
    stacks = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR1, stacks)  # the ranks inherit it
    pids = [_fork_rank(program, rank, pipes, news, args) for rank in range(len(pipes))]
    for pipe in pipes:
        pipe.close()
    news.send((pids, stacks))
    running = set(pids)
    while running:
        pid, status = os.waitpid(-1, 0)
        if pid in running:
            running.discard(pid)
            news.send((pids.index(pid), os.waitstatus_to_exitcode(status)))
    after = before if network else _traces(everything=not refusal)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in _living_children(children)]
    news.send(Left(left, *(sorted(now - then) for now, then in zip(after, before, strict=True))))


def _living_children(children: Path) -> list[str]:
    """The children of the leader that still run. Orphans of the ranks are among them; dead ones are reaped here."""
    while children.read_text():
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return children.read_text().split()
    return []


def _fork_rank(
    program: Callable[..., None], rank: int, pipes: list[Connection], news: Connection, args: tuple[Any, ...]
) -> int:
    leader = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != leader:
            return 0
        news.close()
        for other, pipe in enumerate(pipes):
            if other != rank:
                pipe.close()
        torch.set_num_threads(1)
        gc.freeze()  # imported modules are left out of garbage collections
        program(rank, len(pipes), pipes[rank], *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
    return 0


def _isolate(shm: str | None) -> str:
    """Moves this process into namespaces of its own. Returns the reason if it cannot."""
    try:
        try:
            _call(_libc.unshare, _CLONE_NEWNS | _CLONE_NEWNET)
        except PermissionError:
            user, group = os.getuid(), os.getgid()
            _call(_libc.unshare, _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
        flags = _MS_RDONLY if shm is None else 0
        _mount("tmpfs", "/dev/shm", "tmpfs", flags, shm)
        for folder in ("/tmp", "/var/tmp"):
            if os.path.isdir(folder):
                _mount(folder, folder, None, _MS_BIND | _MS_REC, None)
                _mount(None, folder, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None)
    except OSError as error:
        return f"no namespaces here: {error}"
    return ""


def _traces(everything: bool) -> tuple[set[str], set[str]]:
    """The files and abstract sockets that are there: all of them, or those with our name if others make some too.

    In namespaces of their own the ranks can write to /dev/shm alone: what appears elsewhere meanwhile is not theirs.
    """
    files = {
        os.path.join(folder, name)
        for folder in (("/dev/shm",) if everything else ("/dev/shm", "/tmp", "/var/tmp"))
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if everything or "distca" in name
    }
    sockets = {line.split()[-1] for line in Path("/proc/self/net/unix").read_text().splitlines() if " @" in line}
    return files, {name for name in sockets if everything or name.startswith("@distca")}


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call(_libc.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def _call(function: Any, *args: Any) -> None:
    if function(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function.__name__}: {os.strerror(error)}")


# ---- in a rank


def connect(
    rank: int,
    pipe: Connection,
    *,
    slot_bytes: int = 1 << 20,
    timeout: float = 600.0,
    control: str = "shm",
    **options: Any,
):
    """Joins the group; the addresses go over the pipe (`Group.exchange_addresses`).

    With a device, the group's control transport may be "tcp" instead of "shm". The `Group` then needs `network`.
    """
    listener = _C.TcpListener("127.0.0.1") if control == "tcp" else _C.ShmListener()
    pipe.send(listener.address)
    return connect_to(listener, rank, pipe.recv(), slot_bytes=slot_bytes, timeout=timeout, **options)


def connect_to(
    listener: Any,
    rank: int,
    addresses: list[str],
    *,
    slot_bytes: int = 1 << 20,
    timeout: float = 600.0,
    connect_timeout: float = 20.0,
    name: str = "default",
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    heads: distca.Heads = HEADS,
    device: str = "",
) -> distca.Context:
    """Makes this rank's context. With a device, ranks write into each other's GPU or, on "cpu", into what stands for
    one.
    """
    options: dict[str, Any] = {
        "listener": listener,
        "rank": rank,
        "addresses": addresses,
        "name": name,
        "slot_bytes": slot_bytes,
        "timeout": timeout,
        "connect_timeout": connect_timeout,
        "cost": CostModel().core,
    }
    if device == "cpu":
        core = _emulation.connect_ipc(**options)
    elif device:
        core = _C.connect_ipc(device=device, attention="own", put_blocks=0, **options)
    elif reorder_seed is None:
        core = _C.connect_shm(progress_thread=progress_thread, **options)
    else:
        core = _emulation.connect_shm(reorder_seed=reorder_seed, progress_thread=progress_thread, **options)
    return distca.Context(core, heads, CostModel())


def plan_for(ranks: int, rank: int, *, heads: distca.Heads = HEADS, rows: int = 96) -> distca.Plan:
    """A plan in which every rank sends to some other rank: one document lies over all ranks, and short ones follow."""
    layout = distca.Layout.packed([rows * ranks - 40, 30, 10], ranks=ranks, tokens_per_rank=rows)
    return distca.plan(layout, heads, rank=rank, tolerance=0.0, min_rows=1, capacity=2**62)


def tensors_for(plan: distca.Plan, seed: int = 0) -> list[torch.Tensor]:
    """The q, k and v, which need gradients, and the gradient of out."""
    generator = torch.Generator().manual_seed(1000 * seed + plan.rank)
    heads = plan.heads
    shapes = [(heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim), (heads.q, heads.value_dim)]
    made = [torch.randn(plan.num_rows, *shape, generator=generator).to(heads.dtype) for shape in shapes]
    return [one.requires_grad_(i < 3) for i, one in enumerate(made)]


def fault_of(function: Callable[[], Any]) -> tuple[str, str]:
    """The type and message of the distca error that the call raises; ("", "") if it returns."""
    try:
        function()
    except distca.DistcaError as error:
        return type(error).__name__, str(error)
    return "", ""


def held() -> list[str]:
    """What this process holds of our transport: sockets, memfds and their mappings."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "/memfd:distca")):
            found.append(target)
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:distca" in line]
    return found
