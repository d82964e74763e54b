"""Ranks of the control transport over TCP in threads of one process, and someone who speaks its protocol by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

import distca
from distca import _C
from distca.testing import _emulation
from support.processes import LIMIT

WORDS = 80
ALL_BITS = 2**64 - 1
SIGNAL, QUESTION, ANSWER, GOODBYE, FAREWELL = 1, 2, 3, 4, 5


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6"))


# ---- members


def listen(number: int, host: str = "127.0.0.1") -> list[Any]:
    return [_C.TcpListener(host) for _ in range(number)]


def join(
    listener: Any,
    rank: int,
    addresses: list[str],
    words: int = WORDS,
    timeout: float = LIMIT,
    latency: float | None = None,
) -> Any:
    """One rank's transport; with a latency in seconds, it sends over a link."""
    return _emulation.connect_tcp(
        listener=listener, rank=rank, addresses=addresses, num_signals=words, timeout=timeout, latency=latency
    )


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each call returned, or the distca error that it raised."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except distca.DistcaError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def group_of(ranks: int, host: str = "127.0.0.1", latency: float | None = None) -> list[Any]:
    listeners = listen(ranks, host)
    addresses = [one.address for one in listeners]
    group = in_threads(*(lambda r=r: join(listeners[r], r, addresses, latency=latency) for r in range(ranks)))
    for one in group:
        assert not isinstance(one, Exception), one
    return group


# ---- someone who speaks the protocol by hand


def place_of(address: str) -> tuple[str, int]:
    _, host, port, _ = address.split("/")
    return host, int(port)


def token_of(address: str) -> bytes:
    return bytes.fromhex(address.split("/")[3])


def hello(to: bytes, own: bytes, rank: int = 1, ranks: int = 2, words: int = WORDS) -> bytes:
    return b"bdcatcp1" + to + own + struct.pack("<3q", rank, ranks, words)


def message(kind: int, word: int = 0, value: int = 0, count: int = 0) -> bytes:
    return struct.pack("<IIqQ", kind, count, word, value)


class ByHand:
    """Rank 1 of two. It sends what a test tells it to."""

    def __init__(self, read_buffer: int | None = None) -> None:
        (listener,) = listen(1)
        # Nobody connects to rank 1, because the higher rank connects to the lower.
        own = b"0123456789abcdef"
        addresses = [listener.address, f"distca-tcp-1/127.0.0.1/9/{own.hex()}"]
        self.socket = socket.socket()
        self.socket.settimeout(LIMIT)
        if read_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)

        def call() -> None:
            self.socket.connect(place_of(addresses[0]))
            self.socket.sendall(hello(token_of(addresses[0]), own))
            answer = self.read(64)
            assert answer == b"adcatcp1" + own + token_of(addresses[0]) + struct.pack("<3q", 0, 2, WORDS)

        self.peer = in_threads(lambda: join(listener, 0, addresses), call)[0]
        assert not isinstance(self.peer, Exception), self.peer

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()
        self.peer = None

    def read(self, number: int) -> bytes:
        data = b""
        while len(data) < number:
            more = self.socket.recv(number - len(data))
            assert more, f"the end of the connection after {data!r}"
            data += more
        return data

    def expect(self, *expected: int) -> None:
        """The kind, count, word and value of the next message."""
        assert struct.unpack("<IIqQ", self.read(24)) == expected

    def expect_end(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert self.socket.recv(1) == b""
