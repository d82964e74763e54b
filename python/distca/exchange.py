"""The collective behind ``transport="torch"``: ``all_to_all_single`` over a group of the context's own.

The group has the ranks of the user's, so that nothing that runs on theirs (DDP's hooks, say) can come between two ranks
in another order. What a rank knows of a fault it leaves in the store of ``torch.distributed``, where its peers, whose
connections then break, look for the cause.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distca.errors import (
    DistcaError,
    InvalidArgumentError,
    PeerDiedError,
    PeerLeftError,
    PeerTimeoutError,
    PlanMismatchError,
)

REPORT_SECONDS = 1.0
"""How long a rank whose exchange broke waits for what its peers know of it."""

_TEXT_BYTES = 512
_open: set[Exchange] = set()  # a forked child must not end the threads and sockets of its parent's groups


class Exchange:
    """Swaps bytes between the ranks of `group`. Collective over it.

    Args:
        group: the ranks. With gloo bytes go from memory to memory, with NCCL by way of the current CUDA device.
        timeout: seconds for one exchange, so also for the ranks to wait for each other.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._device = device_of(group)
        self._pid = os.getpid()
        name = gather_text(secrets.token_hex(8), group)[0]
        self._store = dist.PrefixStore(f"distca/{name}", dist.distributed_c10d._get_default_store())
        self._backend: Any = self._connect()
        self._reported = False
        _open.add(self)

    def _connect(self) -> Any:
        make: Callable[..., Any] = dist.ProcessGroupGloo if self._device.type == "cpu" else dist.ProcessGroupNCCL
        store = dist.PrefixStore("group", self._store)
        try:
            return make(store, self._rank, self._ranks, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise PeerTimeoutError(f"init: rank {self._rank} could not connect to its peers: {error}") from error

    def all_to_all(
        self, send: memoryview, send_bytes: list[int], receive: memoryview, receive_bytes: list[int]
    ) -> None:
        """Sends ``send_bytes[p]`` bytes to each rank p and receives ``receive_bytes[p]``, in the order of the ranks.

        Raises:
            PeerDiedError, PeerLeftError, PeerTimeoutError, PlanMismatchError: with the cause, as far as the ranks
                know it.
        """
        backend = self._backend
        if backend is None:
            raise PeerDiedError("this rank has left the group")
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
        """Leaves the group after a fault of this rank; peers that wait for it learn of it at once."""
        if not self._reported:
            self._report(kind, text)
        self._leave()

    def close(self) -> None:
        """Leaves the group in good order."""
        if self._pid == os.getpid() and self._backend is not None:
            self.abandon("", "")

    def _leave(self) -> None:
        self._backend = None  # its connections close with it
        _open.discard(self)

    def _report(self, kind: str, text: str) -> None:
        """Tells the peers: the kind of a fault, "" for a rank that closes its context."""
        self._reported = True
        try:
            self._store.set(str(self._rank), json.dumps([kind, text]))
        except RuntimeError:  # the store is gone with the process that held it
            return

    def _reports(self, others: list[int]) -> dict[int, tuple[str, str]]:
        """What those of the ranks have reported that have."""
        try:
            found = [rank for rank in others if self._store.check([str(rank)])]
            return {rank: tuple(json.loads(self._store.get(str(rank)))) for rank in found}
        except RuntimeError:
            return {}

    def _explain(self, error: RuntimeError) -> DistcaError:
        """Why an exchange broke: what a peer reports as its own fault, or which peers say nothing."""
        late = "timed out" in str(error).lower()
        waiting = "waiting"  # broke off as the others did, and knows no cause
        self._report(waiting, str(error))
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        deadline = time.monotonic() + REPORT_SECONDS
        while True:
            reports = self._reports(others)
            for rank, (kind, text) in reports.items():
                if kind != waiting:
                    return _as_reported(rank, kind, text)
            if len(reports) == len(others) or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        late |= any("timed out" in text.lower() for _, text in reports.values())
        silent = [rank for rank in others if rank not in reports]
        names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}" if silent else "a peer"
        if late:
            explained: DistcaError = PeerTimeoutError(f"waited {self._timeout:g} s for {names} to exchange rows")
        else:
            reason = str(error).partition(". ")[0]  # the rest is advice
            explained = PeerDiedError(f"{names} died, or the connection to it was lost: {reason}")
        self._report(type(explained).__name__, str(explained))
        return explained


def _as_reported(rank: int, kind: str, text: str) -> DistcaError:
    if not kind:
        return PeerLeftError(f"rank {rank} closed its context while this rank exchanges rows with it")
    kinds = {one.__name__: one for one in (PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError)}
    if kind in kinds:
        return kinds[kind](f"rank {rank} reports: {text}")
    return PeerLeftError(f"rank {rank} abandoned this context after an error of its own: {text}")


def all_to_all_single(
    backend: Any, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
) -> None:
    """As ``torch.distributed.all_to_all_single``, which does not take a backend that is in no list of groups."""
    options = dist.distributed_c10d.AllToAllOptions()
    backend.alltoall_base(output, input, output_sizes, input_sizes, options).wait()


def _as_tensor(memory: memoryview) -> torch.Tensor:
    if memory.nbytes == 0:  # which torch.frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors the group's collectives take: the CPU where they may be there."""
    backend = str(dist.get_backend(group))
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_text(text: str, group: dist.ProcessGroup) -> list[str]:
    """All ranks' texts, over the group's own collective; bytes only, nothing is unpickled."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        raise InvalidArgumentError(f"init: a text of {len(data)} bytes; at most {_TEXT_BYTES} are expected")
    mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device_of(group))
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [os.fsdecode(bytes(one.cpu().tolist()).rstrip(b"\0")) for one in everyone]
