"""Reports of faults, and strangers who call."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from distca.connect.fault_reports import FaultReports


def test_a_stranger_who_says_nothing_holds_nothing_up() -> None:
    here, peer = FaultReports(0, "127.0.0.1"), FaultReports(1, "127.0.0.1")
    host, port, _ = here.address.split("/")
    for one in (here, peer):
        one.meet([here.address, peer.address])
    with socket.create_connection((host, int(port))) as stranger, ThreadPoolExecutor(1) as thread:
        try:
            assert thread.submit(here.heard, 0.1).result(timeout=10.0) == {}
            peer.tell("PeerDiedError", "rank 2 died")
            assert thread.submit(here.heard, 10.0).result(timeout=20.0) == {1: ("PeerDiedError", "rank 2 died")}
        finally:
            stranger.close()  # a thread that it holds up would never end
            here.close()
            peer.close()


def test_calls_of_strangers_fill_no_queue_where_somebody_looks_now_and_then() -> None:
    here, peer = FaultReports(0, "127.0.0.1"), FaultReports(1, "127.0.0.1")
    host, port, _ = here.address.split("/")
    for one in (here, peer):
        one.meet([here.address, peer.address])
    try:
        for _ in range(3):
            for _ in range(1500):
                socket.create_connection((host, int(port))).close()
            assert here.heard(0.0) == {}
        peer.tell("PeerDiedError", "rank 2 died")
        assert here.heard(10.0) == {1: ("PeerDiedError", "rank 2 died")}
    finally:
        here.close()
        peer.close()
