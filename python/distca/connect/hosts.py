"""How ranks find each other for a control transport: over shared memory on one host, or by addresses of their hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import torch.distributed as dist

from distca import _C
from distca.connect.exchange import gather_text, short
from distca.errors import DistcaError, InvalidArgumentError

ADDRESS_VARIABLE = "DISTCA_HOST_ADDRESS"
"""The environment variable for the numeric address of this host. `host_address` prefers it to its own search."""


def listen(
    group: dist.ProcessGroup | None, timeout: float | None = None
) -> tuple[_C.ShmListener | _C.TcpListener, list[str]]:
    """This rank's listener, and the addresses of all ranks: shared memory if all are on one host, otherwise TCP.

    It is collective over the group. None stands for a group of this process alone. Ranks wait for each other up to
    `timeout` seconds (None: the group's own timeout). It raises the errors of `host_address`, and InvalidArgumentError
    on all ranks if one of them cannot listen at its address.
    """
    shm = _C.ShmListener()
    if group is None:
        return shm, [shm.address]
    addresses = gather_text(shm.address, group, timeout)
    if _C.can_share_memory(addresses):
        return shm, addresses
    tcp, problem = None, ""
    host = host_address(group, timeout=timeout)
    try:
        tcp = _C.TcpListener(host)
    except DistcaError as error:
        problem = str(error)
    addresses = gather_text(tcp.address if tcp else short(problem), group, timeout)
    return _all_listen(tcp, addresses), addresses


def _all_listen(tcp: _C.TcpListener | None, addresses: list[str]) -> _C.TcpListener:
    for rank, text in enumerate(addresses):
        if not text.startswith("distca-tcp"):
            raise InvalidArgumentError(
                f"rank {rank} cannot listen: {text}; {ADDRESS_VARIABLE} there names an address of its own host"
            )
    assert tcp is not None
    return tcp


def host_address(group: dist.ProcessGroup, address: str | None = None, timeout: float | None = None) -> str:
    """The numeric IPv4 or IPv6 address at which the other ranks reach this host. It is collective over the group.

    This is the address from which this host reaches ``MASTER_ADDR``. If that is not set, or leads to this host alone,
    it is the address of the host's own name. If all ranks are on one host, it may be 127.0.0.1.

    Args:
        group: the ranks.
        address: an address to use instead; by default the environment's ``DISTCA_HOST_ADDRESS``, if it is set.
        timeout: seconds to wait for the other ranks (None: the group's own timeout).

    Raises:
        InvalidArgumentError: on all ranks, if the address of one is not numeric or not known, or if ranks are on
            several hosts and other hosts cannot reach it.
    """
    given = address or os.environ.get(ADDRESS_VARIABLE, "")
    candidates = [given] if given else _candidates()
    told = [text.split("|") for text in gather_text(short("|".join([_host(), *candidates])), group, timeout)]
    are_apart = len({host for host, *_ in told}) > 1
    chosen = [_choose(rank, theirs, are_apart) for rank, (_, *theirs) in enumerate(told)]
    return chosen[dist.get_rank(group)]


class _NotKnownError(InvalidArgumentError):
    """Other hosts cannot reach any address of a host that is known."""


def address_if_known(group: dist.ProcessGroup, timeout: float) -> str:
    """The `host_address` of this rank; empty on all ranks if the address of one is not known.

    Raises:
        InvalidArgumentError: on all ranks, if the environment's ``DISTCA_HOST_ADDRESS`` of one is no numeric address.
    """
    try:
        return host_address(group, timeout=timeout)
    except _NotKnownError:
        return ""


def _choose(rank: int, candidates: list[str], are_apart: bool) -> str:
    """The first candidate that other ranks can reach. The result and the error are the same on all ranks."""
    for text in candidates:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            address = None
        if address is None or address.is_unspecified or "%" in text:
            raise InvalidArgumentError(
                f"{ADDRESS_VARIABLE} = {text!r} on rank {rank}; the numeric IPv4 or IPv6 address of its host is "
                "expected"
            )
        if not (are_apart and address.is_loopback):
            return text
    only = f"has only the addresses {', '.join(candidates)}, which other hosts cannot reach"
    raise _NotKnownError(
        f"the host of rank {rank} {only if candidates else 'has no address, because its name stands for none'}; set "
        f"{ADDRESS_VARIABLE} there to its numeric address in the network of the other hosts, or set MASTER_ADDR on all "
        "hosts to a name that all of them reach"
    )


def _candidates() -> list[str]:
    names = [os.environ.get("MASTER_ADDR"), socket.gethostname()]
    found = [_address_towards(name) for name in names if name]
    return list(dict.fromkeys([*(one for one in found if one), "127.0.0.1"]))


def _address_towards(name: str) -> str | None:
    """This host's own address when it sends to that name. Nothing is sent. None if there is none."""
    try:
        ways = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the latter for names that are too long for DNS
        return None
    for family, kind, protocol, _, there in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(there)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if "%" not in own:  # an address with % is valid on one link alone
            return own
    return None


def _host() -> str:
    """The identity of this host and network namespace, inside which ranks reach each other's loopback addresses."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"
