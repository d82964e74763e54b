"""Ranks on separate "hosts": network namespaces joined by a switch whose links a test can cut and mend.

The namespaces have no names. They belong to the processes of a `Group` and end with them, however a test ends. This
needs iproute2 and the right to make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from support.processes import _CLONE_NEWNET, Group, _call, _libc

_TO_ALL = ("learning", "flood", "bcast_flood", "mcast_flood")
"""What of a link says that packets to unknown hosts, or to all, go there too."""


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Hosts(Group):
    """Runs `program(rank, hosts, pipe, *args)` on each of the hosts; another process is the switch between them."""

    def __init__(self, program: Callable[..., None], hosts: int, *args: Any) -> None:
        super().__init__(_on_a_host, hosts + 1, program, args)
        self._switch = hosts
        self.hosts = list(range(hosts))

    def join(self) -> None:
        """Skips the test if hosts cannot be made here."""
        if self.refusal:
            self.tell(None)
            pytest.skip(self.refusal)
        for host in self.hosts:
            assert self.receive(host) == "apart"
            self._ip(f"link add v{host} type veth peer name eth0 netns {self.pids[host]}", *_port(host, "up"))
        self.tell("joined", self.hosts)

    def cut(self, host: int) -> None:
        """From now on packets to and from that host vanish, and nobody is told."""
        self._ip(f"link set v{host} nomaster")

    def deafen(self, host: int) -> None:
        """From now on packets to that host vanish, but what it sends arrives."""
        self._ip(f"link set v{host} type bridge_slave {' '.join(f'{one} off' for one in _TO_ALL)} fdb_flush")

    def mend(self, host: int) -> None:
        self._ip(*_port(host))

    def exchange_addresses(self) -> None:
        self.tell([self.receive(host) for host in self.hosts], self.hosts)

    def has_answered(self, host: int, seconds: float) -> bool:
        """Whether a message of that host is there or comes within this many seconds."""
        return self._pipes[host].poll(seconds)

    def leave(self) -> None:
        self.send(self._switch, None)

    def _ip(self, *commands: str) -> None:
        self.send(self._switch, commands)
        problem = self.receive(self._switch)
        assert not problem, problem


def _port(host: int, more: str = "") -> list[str]:
    to_all = " ".join(f"{one} on" for one in _TO_ALL)
    return [f"link set v{host} master switch {more}", f"link set v{host} type bridge_slave {to_all}"]


@contextmanager
def hosts_apart(program: Callable[..., None], hosts: int, *args: Any) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("no command ip (iproute2) here")
    with Hosts(program, hosts, *args) as group:
        group.join()
        yield group
        group.leave()


def _ip(command: str) -> str:
    """The error of the command; empty if it succeeded."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    return f"ip {command}: {done.stderr}" if done.returncode else ""


def _on_a_host(rank: int, ranks: int, pipe: Connection, program: Callable[..., None], args: tuple[Any, ...]) -> None:
    if rank == ranks - 1:
        return _be_the_switch(pipe)
    _call(_libc.unshare, _CLONE_NEWNET)
    pipe.send("apart")
    if pipe.recv() is None:
        return
    for command in (f"addr add {address_of(rank)}/24 dev eth0", "link set eth0 up", "link set lo up"):
        assert not (problem := _ip(command)), problem
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", MASTER_ADDR=address_of(0))
    program(rank, ranks - 1, pipe, *args)


def _be_the_switch(pipe: Connection) -> None:
    """Runs the command in the namespace of the group's leader."""
    assert not (problem := _ip("link add switch type bridge") or _ip("link set switch up")), problem
    while (commands := pipe.recv()) is not None:
        pipe.send("".join(map(_ip, commands)))
