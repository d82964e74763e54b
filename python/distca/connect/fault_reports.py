"""Fault reports: short messages over TCP in which ranks tell each other of faults, without long waits.

Every rank listens. A rank with a report connects to each of the others, writes it and hangs up. The system keeps what
has arrived until the receiver looks for it, even if its sender has ended. A peer that cannot be reached, for example
because its network is cut, costs `TELL_SECONDS` once and is not told.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

TELL_SECONDS = 1.0
"""How long a rank tries to reach its peers, for all of them together."""

_MOST_BYTES = 1 << 14
MOST_CHARACTERS = 2000  # of a report's text; each takes at most four bytes
_BACKLOG = 4096

Report = tuple[str, str]
"""The kind of a fault and its text."""


class FaultReports:
    """The reports that one rank sends to its peers and gets from them.

    Args:
        rank: this rank.
        host: the numeric address at which the peers reach this host. If it is empty, they do not reach it, and this
            rank gets no report.
    """

    def __init__(self, rank: int, host: str) -> None:
        self._rank = rank
        self._token = secrets.token_hex(16)
        self._listener = listen(host) if host else None
        self._peers: dict[int, tuple[str, int, str]] = {}  # host, port and token of each peer
        self._arriving: list[tuple[socket.socket, bytearray]] = []
        self._heard: dict[int, Report] = {}

    @property
    def address(self) -> str:
        """Where peers report to this rank; whoever knows it can. Empty if this rank does not listen."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{host}/{port}/{self._token}"

    def meet(self, addresses: Sequence[str]) -> None:
        """Takes the addresses of all ranks."""
        for peer, text in enumerate(addresses):
            if text and peer != self._rank:
                host, port, token = text.split("/")
                self._peers[peer] = host, int(port), token

    def tell(self, kind: str, text: str) -> None:
        """Sends a report to the peers that can be reached."""
        content = json.dumps([self._rank, kind, text[:MOST_CHARACTERS]], ensure_ascii=False)
        deadline = time.monotonic() + TELL_SECONDS
        with selectors.DefaultSelector() as calls:
            for peer, (host, port, _) in self._peers.items():
                try:
                    call = _call(host, port)
                except OSError:  # this process has too many open files
                    break
                calls.register(call, selectors.EVENT_WRITE, peer)
            while calls.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in calls.select(left):
                    calls.unregister(key.fileobj)
                    _say(key.fileobj, f"{self._peers[key.data][2]}\n{content}")
            for key in list(calls.get_map().values()):
                calls.unregister(key.fileobj)
                _say(key.fileobj, "")
                del self._peers[key.data]

    def heard(self, seconds: float) -> dict[int, Report]:
        """The last report of each peer that has sent one, after a wait for news of at most so many seconds."""
        if self._listener is None:
            time.sleep(seconds)
            return {}
        with selectors.DefaultSelector() as news:
            for one in (self._listener, *(call for call, _ in self._arriving)):
                news.register(one, selectors.EVENT_READ)
            news.select(seconds)
        room = 2 * len(self._peers) + 2
        while self._accept(room) == room:
            self._receive(room)
        self._receive(room)
        return dict(self._heard)

    def _accept(self, most: int) -> int:
        """Takes up to so many connections that have arrived, and returns their number."""
        assert self._listener is not None
        accepted = 0
        with contextlib.suppress(OSError):  # no further connection has arrived
            while accepted < most:
                call = self._listener.accept()[0]
                call.setblocking(False)  # the listener's own mode is not handed on
                self._arriving.append((call, bytearray()))
                accepted += 1
        return accepted

    def _receive(self, room: int) -> None:
        """Takes in what has arrived, and keeps the last `room` of the connections on which more may come: strangers
        that connect and say nothing must not use up this process's open files.
        """
        still = []
        for call, data in self._arriving:
            if receive(call, data):
                still.append((call, data))
            else:
                call.close()
                self._take(bytes(data))
        for call, _ in still[:-room]:
            call.close()
        self._arriving = still[-room:]

    def _take(self, data: bytes) -> None:
        token, _, content = data.partition(b"\n")
        if not hmac.compare_digest(token, self._token.encode()):
            return
        rank, kind, text = json.loads(content)
        self._heard[rank] = kind, text

    def close(self) -> None:
        for call, _ in self._arriving:
            call.close()
        self._arriving = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str) -> socket.socket | None:
    """A listening socket at that address; None if this host has no such address."""
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _call(host: str, port: int) -> socket.socket:
    call = socket.socket(_family(host), socket.SOCK_STREAM)
    call.setblocking(False)
    call.connect_ex((host, port))  # what is wrong shows when it is written to
    return call


def _say(call: Any, message: str) -> None:
    with call, contextlib.suppress(OSError):  # the peer has ended
        call.send(message.encode())  # the system takes so short a message whole


def receive(call: socket.socket, data: bytearray) -> bool:
    """Appends what has arrived. Returns False once nothing more can come."""
    try:
        while len(data) < _MOST_BYTES:
            more = call.recv(_MOST_BYTES)
            if not more:
                return False
            data += more
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
