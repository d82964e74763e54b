"""Fault watches: processes of a tensor group tell each other of faults, which are in different contexts.

Processes of a tensor group wait for each other in every layer, in collectives of their own. A fault of one context
would show in the others only there. Therefore each process has a connection to each other process of its tensor group,
and a thread that sleeps until one of them sends a fault or hangs up. The thread passes it on to this process's context
(`hear`), which tells its ranks. So a fault anywhere reaches every process in two hops, and nothing is done per step.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from distca import _C
from distca.connect import hosts
from distca.connect.exchange import gather_text
from distca.connect.fault_reports import MOST_CHARACTERS, listen, receive

_CALL_SECONDS = 10.0
_open: weakref.WeakSet[FaultWatch] = weakref.WeakSet()


class FaultWatch:
    """This process's connections to the others of its tensor group. Making it is collective over the group.

    Where the address of a host is not known, or a process cannot be reached there, nothing is told.

    Args:
        group: the tensor group.
        core: the context that hears of faults elsewhere.
        timeout: seconds to wait for the other processes.
    """

    def __init__(self, group: dist.ProcessGroup, core: _C.Context, timeout: float) -> None:
        self._hear: Callable[[str, str], None] = core.hear
        self._rank, self._token = dist.get_rank(group), secrets.token_hex(16)
        self._names = [
            f"global rank {dist.get_global_rank(group, rank)} (tensor rank {rank})"
            for rank in range(dist.get_world_size(group))
        ]
        host = hosts.address_if_known(group, timeout)
        self._listener = listen(host) if host else None
        mine = "" if self._listener is None else f"{host}/{self._listener.getsockname()[1]}/{self._token}"
        addresses = gather_text(mine, group, timeout)
        self._calls = [self._call(text) for rank, text in enumerate(addresses) if text and rank != self._rank]
        self._wake, self._bell = socket.socketpair()
        self._arriving: dict[socket.socket, bytearray] = {}
        _open.add(self)
        self._thread = threading.Thread(target=self._listen_on, name="distca faults", daemon=True)
        self._thread.start()

    def _call(self, address: str) -> socket.socket | None:
        host, port, token = address.split("/")
        with contextlib.suppress(OSError):
            call = socket.create_connection((host, int(port)), _CALL_SECONDS)
            call.sendall(f"{token} {self._rank}\n".encode())
            return call
        return None

    def tell(self, kind: str, text: str) -> None:
        """Tells the others of a fault of this process's context, and hangs up. An empty kind is an orderly end."""
        calls, self._calls = self._calls, []
        content = json.dumps([kind, text[:MOST_CHARACTERS]], ensure_ascii=False).encode()
        for call in calls:
            if call is not None:
                with call, contextlib.suppress(OSError):  # the other one has ended
                    call.setblocking(False)
                    call.send(content)  # the system takes so short a message whole

    def close(self) -> None:
        """Says goodbye, and ends the thread."""
        self.tell("", "")
        self._bell.close()
        self._thread.join()
        self.drop()
        self._hear = lambda kind, text: None  # the core, which calls `tell`, is not kept alive in a circle
        _open.discard(self)

    def drop(self) -> None:
        """Closes all sockets. In a forked child, others then notice when the parent ends."""
        for one in (self._listener, self._wake, self._bell, *self._calls, *self._arriving):
            if one is not None:
                one.close()

    def _listen_on(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the program's threads
        with selectors.DefaultSelector() as news:
            news.register(self._wake, selectors.EVENT_READ)
            if self._listener is not None:
                news.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in news.select():
                    one: Any = key.fileobj
                    if one is self._wake:
                        return
                    if one is self._listener:
                        self._accept(news)
                    elif one in self._arriving and not receive(one, self._arriving[one]):
                        self._take(self._let_go(one, news))

    def _accept(self, news: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            call = self._listener.accept()[0]
            call.setblocking(False)
            self._arriving[call] = bytearray()
            news.register(call, selectors.EVENT_READ)
        except OSError as error:  # whoever called has gone again
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # the call stays, and would be news again at once
        # Strangers that connect and say nothing must not use up this process's open files.
        token = self._token.encode()
        strangers = [call for call, data in self._arriving.items() if not data.startswith(token)]
        for call in strangers[: -len(self._names)]:
            self._let_go(call, news)

    def _let_go(self, call: socket.socket, news: selectors.BaseSelector) -> bytes:
        news.unregister(call)
        call.close()
        return bytes(self._arriving.pop(call))

    def _take(self, data: bytes) -> None:
        """Takes in what somebody sent who has hung up."""
        hello, _, content = data.partition(b"\n")
        token, _, rank = hello.partition(b" ")
        if not hmac.compare_digest(token, self._token.encode()):
            return
        name = self._names[int(rank)]
        if not content:
            self._hear("PeerDiedError", f"{name} died")
            return
        kind, text = json.loads(content)
        if kind:
            self._hear(kind, f"{name} reports: {text}")


def _drop_in_child() -> None:
    for watch in _open:
        watch.drop()


os.register_at_fork(after_in_child=_drop_in_child)
