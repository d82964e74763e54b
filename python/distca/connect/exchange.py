"""The exchange of ``transport="torch"``: ``all_to_all_single`` over a group of the context's own.

The group has the ranks of the user's group. It is another group, because what runs on the user's (DDP's hooks, for
example) could run in another order on another rank. A rank tells its peers of faults by `FaultReports`. A peer whose
connections break looks there for the cause. Once a context is made, nothing is asked of the store of
``torch.distributed``: a question to it blocks for as long as the network to it is cut, and prints C++ frames when it
fails.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distca.connect.fault_reports import FaultReports
from distca.errors import (
    DistcaError,
    InvalidArgumentError,
    OperatingSystemError,
    PeerDiedError,
    PeerLeftError,
    PeerTimeoutError,
    PlanMismatchError,
)
from distca.planner.private_group import all_to_all_single, connected, is_late, waited

REPORT_SECONDS = 1.0
"""How long a rank whose exchange broke tells its peers, and waits for their reports."""

_DRAIN_SECONDS = 1.0
_TEXT_BYTES = 512
_WAITING = "waiting"
"""The report of a rank that knows no cause: its exchange broke off because those of the others did."""
_open: set[Exchange] = set()  # kept alive: a forked child must not end its parent's threads and sockets


class Exchange:
    """Exchanges bytes between the ranks of `group`. This is collective over the group.

    Args:
        group: the ranks. With gloo bytes go from memory to memory, with NCCL by way of the current CUDA device.
        timeout: seconds for one exchange, which includes the wait for the other ranks.
        host: the numeric address at which peers reach this host, for fault reports; empty if it is unknown.
        global_ranks: the global rank of each rank, for messages, where these are others.

    Raises:
        PeerDiedError, PeerTimeoutError: the ranks do not come together.
        OperatingSystemError: this rank cannot connect.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float, host: str, global_ranks: list[int] | None = None
    ) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._timeout, self._global_ranks = timeout, global_ranks
        self._device = device_of(group)
        self._pid = os.getpid()
        self._reports = FaultReports(self._rank, host)
        told = gather_text(f"{secrets.token_hex(8)}|{self._reports.address}", group, timeout)
        names, addresses = zip(*(text.split("|") for text in told), strict=True)
        self._reports.meet(addresses)
        self._backend: Any = self._connect(f"distca/{names[0]}")
        self._reported = False
        self._drained = time.monotonic()
        _open.add(self)

    def _connect(self, name: str) -> Any:
        limit = timedelta(seconds=self._timeout)
        try:
            return connected(name, self._rank, self._ranks, limit, self._device.type)
        except RuntimeError as error:
            kind = PeerTimeoutError if is_late(error) else OperatingSystemError
            raise kind(f"init: rank {self._rank} could not connect to its peers: {error}") from error

    def all_to_all(
        self, send: memoryview, send_bytes: list[int], receive: memoryview, receive_bytes: list[int]
    ) -> None:
        """Sends ``send_bytes[p]`` bytes to each rank p and receives ``receive_bytes[p]``, in the order of the ranks.

        Raises:
            PeerDiedError, PeerLeftError, PeerTimeoutError, PlanMismatchError: the exchange broke. The message has the
                cause, as far as the ranks know it.
        """
        backend = self._backend
        if backend is None:
            raise PeerDiedError("this rank has left the group")
        if time.monotonic() - self._drained > _DRAIN_SECONDS:  # strangers must not fill the queue of those who report
            self._reports.heard(0.0)
            self._drained = time.monotonic()
        outgoing, incoming = _as_tensor(send), _as_tensor(receive)
        try:
            if self._device.type == "cpu":
                all_to_all_single(backend, incoming, outgoing, receive_bytes, send_bytes)
            else:
                there = torch.empty(incoming.shape, dtype=torch.uint8, device=self._device)
                all_to_all_single(backend, there, outgoing.to(self._device), receive_bytes, send_bytes)
                incoming.copy_(there)
        except RuntimeError as error:
            raise self._explain(error) from error

    def abandon(self, kind: str, text: str) -> None:
        """Leaves the group after a fault of this rank. Peers that wait for it learn of it at once."""
        try:
            if not self._reported:
                self._report(kind, text)
        finally:
            self._backend = None  # its connections close with it
            self._reports.close()
            _open.discard(self)

    def close(self) -> None:
        """Leaves the group in good order."""
        if self._pid == os.getpid() and self._backend is not None:
            self.abandon("", "")

    def _report(self, kind: str, text: str) -> None:
        """Tells the peers the kind and text of a fault. A rank that closes its context tells "" as the kind."""
        self._reports.tell(kind, text)
        self._reported = True

    def _explain(self, error: RuntimeError) -> DistcaError:
        """The error for an exchange that broke: a peer's report of its own fault, or the peers that do not answer."""
        late = is_late(error)
        deadline = time.monotonic() + REPORT_SECONDS
        self._report(_WAITING, str(error))
        others = others_of(self._rank, self._ranks)
        while True:
            left = deadline - time.monotonic()
            reports = self._reports.heard(max(left, 0.0))
            for rank, (kind, text) in reports.items():
                if kind != _WAITING:
                    return _as_reported(names_of([rank], self._global_ranks), kind, text)
            if len(reports) == len(others) or left <= 0:
                break
        late |= any(is_late(text) for _, text in reports.values())
        silent = [rank for rank in others if rank not in reports]
        names = names_of(silent, self._global_ranks) if silent else "a peer"
        if late:
            explained: DistcaError = PeerTimeoutError(f"waited {self._timeout:g} s for {names} to exchange rows")
        else:
            reason = str(error).partition(". ")[0]  # the rest is advice
            explained = PeerDiedError(f"{names} died, or the connection to it was lost: {reason}")
        self._report(type(explained).__name__, str(explained))
        return explained


def _as_reported(name: str, kind: str, text: str) -> DistcaError:
    if not kind:
        return PeerLeftError(f"{name} closed its context while this rank exchanges rows with it")
    kinds = {one.__name__: one for one in (PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError)}
    if kind in kinds:
        return kinds[kind](f"{name} reports: {text}")
    return PeerLeftError(f"{name} abandoned this context after an error of its own: {text}")


def _as_tensor(memory: memoryview) -> torch.Tensor:
    if memory.nbytes == 0:  # torch.frombuffer refuses empty memory
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of tensors for the group's collectives: the CPU, or the current GPU if the group has NCCL alone."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def others_of(rank: int, ranks: int) -> list[int]:
    return [other for other in range(ranks) if other != rank]


def names_of(ranks: list[int], global_ranks: list[int] | None = None) -> str:
    """The ranks in the words of messages: "ranks 1, 2", or "ranks 1, 2 (global ranks 3, 5)"."""
    text = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return text if global_ranks is None else f"{text} (global {names_of([global_ranks[rank] for rank in ranks])})"


def short(text: str) -> str:
    """As much of the text as `gather_text` takes, whatever its characters are."""
    return text.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")


def gather_text(text: str, group: dist.ProcessGroup, timeout: float | None = None) -> list[str]:
    """The texts of all ranks, gathered over the group's own collective. Only bytes travel; nothing is unpickled.

    Raises:
        PeerDiedError, PeerTimeoutError: a rank has gone, or does not come within `timeout` seconds (None: the group's
            own timeout).
    """
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise InvalidArgumentError(f"init: a text of {len(data)} bytes; at most {_TEXT_BYTES} are expected")
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device_of(group))
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    options = dist.distributed_c10d.AllgatherOptions()
    if timeout is not None:
        options.timeout = timedelta(seconds=timeout)
    try:
        waited(group.allgather([everyone], [mine], options))
    except RuntimeError as error:
        rank = dist.get_rank(group)
        names = names_of(others_of(rank, len(everyone)))
        if is_late(error):
            limit = "" if timeout is None else f" {timeout:g} s"
            raise PeerTimeoutError(f"init: rank {rank} waited{limit}, and {names} did not join") from error
        raise PeerDiedError(f"init: rank {rank} lost the connection to one of {names}: {error}") from error
    return [os.fsdecode(bytes(one.cpu().tolist()).rstrip(b"\0")) for one in everyone]
