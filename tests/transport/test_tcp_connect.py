"""How ranks find each other over TCP: strangers that connect, ranks that disagree, ranks that do not come."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import distca
from distca import _C
from distca.connect import hosts
from support.processes import LIMIT, fault_of, held
from support.tcp_ranks import IPV6, WORDS, hello, in_threads, join, listen, place_of, token_of

MISSING = r"rank 0 waited too long for the connections of "


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    before = held()
    yield
    assert held() == before


def refusal_of(listener: Any, rank: int, addresses: list[str], timeout: float = 0.05) -> tuple[str, str]:
    return fault_of(lambda: join(listener, rank, addresses, timeout=timeout))


# ---- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
def test_an_address_says_host_port_and_a_token_of_128_random_bits(host: str) -> None:
    texts = [one.address for one in listen(3, host)]
    for text in texts:
        assert re.fullmatch(rf"distca-tcp-1/{re.escape(host)}/[1-9][0-9]*/[0-9a-f]{{32}}", text), text
    assert len({token_of(text) for text in texts}) == 3


@pytest.mark.parametrize(
    "host", ["", "localhost", "0.0.0.0", "::", "*", "127.0.0.1 ", "127.1", "fe80::1%lo", "300.0.0.1", "127.0.0.1:80"]
)
def test_a_host_that_is_not_the_numeric_address_of_one_host_is_refused(host: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="is not the numeric IPv4 or IPv6 address of one host"):
        _C.TcpListener(host)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"^192\.0\.2\.1 is not an address of this host"):
        _C.TcpListener("192.0.2.1")  # nobody has this address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "somewhere",
        "tcp://127.0.0.1:80",
        "distca-shm-1/a/b/1/00/00",
        f"distca-tcp-2/127.0.0.1/80/{'0' * 32}",
        f"distca-tcp-1/127.0.0.1/0/{'0' * 32}",
        f"distca-tcp-1/127.0.0.1/65536/{'0' * 32}",
        f"distca-tcp-1/127.0.0.1/-1/{'0' * 32}",
        f"distca-tcp-1/0.0.0.0/80/{'0' * 32}",
        f"distca-tcp-1/localhost/80/{'0' * 32}",
        f"distca-tcp-1/127.0.0.1/80/{'0' * 31}g",
        f"distca-tcp-1/127.0.0.1/80/{'0' * 31}",
    ],
)
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    (own,) = listen(1)
    fault = refusal_of(own, 0, [own.address, text])
    assert fault == ("InvalidArgumentError", f'not an address of a TCP listener: "{text[:60]}"')


def test_a_listener_serves_one_group_only_and_its_own_rank() -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    kind, message = refusal_of(a, 1, addresses)
    assert (kind, message) == (
        "InvalidArgumentError",
        "the address of rank 1 is not the one of this rank's listener",
    )
    assert refusal_of(a, 0, addresses)[1] == "this listener has been used up"
    assert fault_of(lambda: a.address)[1] == "this listener has been used up"
    assert refusal_of(b, 2, addresses)[1] == "rank 2 is not one of 2 ranks"


# ---- ranks that do not come


def test_ranks_that_do_not_come_are_all_named_after_the_timeout() -> None:
    everyone = listen(4)
    addresses = [one.address for one in everyone]
    names = [f"rank {r} (127.0.0.1:{place_of(addresses[r])[1]})" for r in range(4)]
    faults = in_threads(
        lambda: join(everyone[0], 0, addresses, timeout=0.3),
        lambda: join(everyone[2], 2, addresses, timeout=10 * LIMIT),
    )
    assert isinstance(faults[0], distca.PeerTimeoutError)
    assert str(faults[0]) == f"rank 0 waited too long for the connections of {names[1]}, {names[3]}"
    assert isinstance(faults[1], distca.PeerDiedError)


def test_an_address_at_which_nobody_listens_any_more_is_named() -> None:
    (gone, own) = listen(2)
    addresses = [gone.address, own.address]
    del gone
    kind, message = refusal_of(own, 1, addresses, timeout=LIMIT)
    port = place_of(addresses[0])[1]
    assert kind == "PeerDiedError"
    assert message.startswith(f"rank 1 found nobody at the address of rank 0 (127.0.0.1:{port}): the process has ended")


def test_a_higher_rank_that_ended_before_it_called_is_noticed_before_the_timeout() -> None:
    (own, gone) = listen(2)
    addresses = [own.address, gone.address]
    del gone
    kind, message = refusal_of(own, 0, addresses, timeout=10 * LIMIT)
    assert (kind, "found nobody at the address of rank 1" in message) == ("PeerDiedError", True)


def test_a_rank_that_gives_up_while_another_waits_for_a_third_is_named_at_once() -> None:
    a, b, silent = listen(3)
    addresses = [a.address, b.address, silent.address]
    early, late = in_threads(
        lambda: join(a, 0, addresses, timeout=0.2), lambda: join(b, 1, addresses, timeout=10 * LIMIT)
    )
    assert isinstance(early, distca.PeerTimeoutError)
    assert "rank 2" in str(early)
    assert isinstance(late, distca.PeerDiedError)
    assert re.search(r"^rank 0 .* hung up on rank 1 before all ranks were connected", str(late))


# ---- ranks that disagree


def test_ranks_with_another_number_of_words_are_both_told_both() -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    faults = in_threads(lambda: join(a, 0, addresses, words=5), lambda: join(b, 1, addresses, words=6))
    for rank, fault in enumerate(faults):
        assert isinstance(fault, distca.InvalidArgumentError), fault
        assert str(fault) == (
            f"rank {1 - rank} has {6 - rank} signal words, rank {rank} has {5 + rank}; they must be equal"
        )


def test_ranks_of_groups_of_another_size_are_both_told_both() -> None:
    a, b, c = listen(3)
    addresses = [a.address, b.address, c.address]
    faults = in_threads(lambda: join(a, 0, addresses[:2]), lambda: join(b, 1, addresses))
    for rank, fault in enumerate(faults):
        assert isinstance(fault, distca.InvalidArgumentError), fault
        assert str(fault) == f"rank {1 - rank} has {3 - rank} ranks, rank {rank} has {2 + rank}"


def test_a_rank_at_the_address_of_another_is_told_who_it_is() -> None:
    a, b, c = listen(3)
    x, y, z = a.address, b.address, c.address
    # Rank 2 believes that rank 1 is rank 0.
    faults = in_threads(lambda: join(b, 1, [x, y, z], timeout=0.3), lambda: join(c, 2, [y, x, z], timeout=0.3))
    assert isinstance(faults[1], distca.InvalidArgumentError)
    assert str(faults[1]) == "the process at the address of rank 0 calls itself rank 1"
    assert isinstance(faults[0], distca.DistcaError)


def test_one_that_has_only_this_ranks_address_cannot_pass_for_a_rank() -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    own = bytes(16)

    def call() -> None:
        with socket.create_connection(place_of(addresses[0]), LIMIT) as stranger:
            stranger.sendall(hello(token_of(addresses[0]), own))
            while stranger.recv(64):
                pass

    fault = in_threads(lambda: join(a, 0, addresses), call)[0]
    assert isinstance(fault, distca.InvalidArgumentError)
    assert "a process that calls itself rank 1 is not the one that rank 0 has the address of" in str(fault)


# ---- strangers


def garbage(address: str) -> bytes:
    return bytes(range(256)) * 40


def wrong_token(address: str) -> bytes:
    token = bytearray(token_of(address))
    token[-1] ^= 1
    return hello(bytes(token), bytes(16))


def half_a_hello(address: str) -> bytes:
    return hello(token_of(address), bytes(16))[:40]


def an_answer(address: str) -> bytes:
    return hello(token_of(address), bytes(16)).replace(b"bdcatcp1", b"adcatcp1")


def silence(address: str) -> bytes:
    return b""


STRANGERS = [garbage, wrong_token, half_a_hello, an_answer, silence]


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hangs up", "stays"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_does_no_harm(stranger: Callable[[str], bytes], hangs_up: bool) -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    there = socket.create_connection(place_of(addresses[0]), LIMIT)
    there.sendall(stranger(addresses[0]))
    if hangs_up:
        there.close()
    group = in_threads(lambda: join(a, 0, addresses), lambda: join(b, 1, addresses))
    group[0].signal(1, 3, 33)
    assert group[1].wait(3, 33, LIMIT)
    assert [group[1].load(word) for word in range(WORDS) if word != 3] == [0] * (WORDS - 1)
    there.close()


@pytest.mark.parametrize("stranger", [garbage, wrong_token, an_answer])
def test_a_stranger_that_shows_no_token_is_hung_up_on_and_mentioned(stranger: Callable[[str], bytes]) -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]

    def call() -> None:
        with socket.create_connection(place_of(addresses[0]), LIMIT) as there:
            there.sendall(stranger(addresses[0]))
            with contextlib.suppress(ConnectionResetError):  # it had sent more than was read
                assert there.recv(64) == b""

    fault = in_threads(lambda: join(a, 0, addresses, timeout=0.3), call)[0]
    assert isinstance(fault, distca.PeerTimeoutError)
    assert re.match(MISSING + r"rank 1 .*; a connection that did not show this rank's token was refused", str(fault))


def test_hundreds_that_connect_and_say_nothing_do_not_keep_a_rank_out() -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    silent = [socket.create_connection(place_of(addresses[0]), LIMIT) for _ in range(300)]
    group = in_threads(lambda: join(a, 0, addresses), lambda: join(b, 1, addresses))
    group[0].signal(1, 0, 1)
    assert group[1].wait(0, 1, LIMIT)
    for one in silent:
        one.close()


def test_nobody_can_connect_once_the_group_is_there() -> None:
    a, b = listen(2)
    addresses = [a.address, b.address]
    group = in_threads(lambda: join(a, 0, addresses), lambda: join(b, 1, addresses))
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place_of(address), LIMIT)
    assert group[0].departed() is None


def test_ranks_that_join_and_leave_over_and_over_find_each_other() -> None:
    for _ in range(15):
        everyone = listen(4)
        addresses = [one.address for one in everyone]
        start = threading.Barrier(4)

        def run(rank: int, everyone: Any = everyone, addresses: Any = addresses, start: Any = start) -> None:
            start.wait(LIMIT)
            rank_of_group = join(everyone[rank], rank, addresses)
            for peer in range(4):
                rank_of_group.signal(peer, rank, rank + 1)
            for peer in range(4):
                assert rank_of_group.wait(peer, peer + 1, LIMIT)

        assert in_threads(*(lambda r=r: run(r) for r in range(4))) == [None] * 4


# ---- by which address


class TestHostAddress:
    """Calls `host_address` with made-up answers of the other ranks."""

    @pytest.fixture(autouse=True)
    def _alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("MASTER_ADDR", hosts.ADDRESS_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        self.monkeypatch = monkeypatch

    def address(self, others: list[str], address: str | None = None) -> str:
        self.monkeypatch.setattr(hosts, "gather_text", lambda text, group, timeout=None: [text, *others])
        self.monkeypatch.setattr(hosts.dist, "get_rank", lambda group: 0)
        return hosts.host_address(None, address)  # type: ignore[arg-type]

    def test_it_is_the_one_by_which_the_master_is_reached(self) -> None:
        for name in ("127.0.0.1", "localhost"):
            self.monkeypatch.setenv("MASTER_ADDR", name)
            assert self.address([]) in ("127.0.0.1", "::1")

    def test_without_a_master_it_is_that_of_the_hosts_name(self) -> None:
        self.monkeypatch.setattr(hosts.socket, "gethostname", lambda: "localhost")
        assert self.address([]) in ("127.0.0.1", "::1")

    def test_it_is_the_given_one_else_that_of_the_environment(self) -> None:
        self.monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        self.monkeypatch.setenv(hosts.ADDRESS_VARIABLE, "10.1.2.3")
        assert self.address(["there|10.1.2.4"]) == "10.1.2.3"
        assert self.address(["there|10.1.2.4"], "fd00::5") == "fd00::5"

    def test_a_loopback_address_serves_the_ranks_of_one_host_alone(self) -> None:
        self.monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        self.monkeypatch.setattr(hosts.socket, "gethostname", lambda: "localhost")
        assert self.address([f"{hosts._host()}|127.0.0.1"]) == "127.0.0.1"
        with pytest.raises(
            distca.InvalidArgumentError, match=r"the host of rank 0 has only the addresses 127\.0\.0\.1"
        ):
            self.address(["there|10.1.2.4"])

    def test_an_address_that_others_reach_is_preferred_where_there_are_others(self) -> None:
        self.monkeypatch.setattr(hosts, "_candidates", lambda: ["127.0.0.1", "10.1.2.3"])
        assert self.address(["there|127.0.0.1|10.1.2.4"]) == "10.1.2.3"
        assert self.address([f"{hosts._host()}|127.0.0.1"]) == "127.0.0.1"

    def test_what_is_wrong_on_one_rank_is_an_error_on_all_that_says_what_to_set(self) -> None:
        with pytest.raises(distca.InvalidArgumentError, match=r"rank 1 .* set DISTCA_HOST_ADDRESS there"):
            self.address(["there|127.0.0.1"], "10.1.2.3")
        with pytest.raises(distca.InvalidArgumentError, match=r"the host of rank 2 has no address"):
            self.address(["there|10.1.2.4", "elsewhere"], "10.1.2.3")
        for text in ("somewhere", "0.0.0.0", "::", "fe80::1%eth0", "10.1.2.3 10.1.2.4", "300.1.1.1"):
            with pytest.raises(distca.InvalidArgumentError, match="numeric IPv4 or IPv6 address") as caught:
                self.address([f"there|{text}"], "10.1.2.3")
            assert f"DISTCA_HOST_ADDRESS = {text!r} on rank 1" in str(caught.value)

    def listen(self, tcp_of_other: str) -> tuple[Any, list[str]]:
        parts = _C.ShmListener().address.split("/")
        answers = iter(["/".join([parts[0], "0a0b", *parts[2:]]), "there|10.1.2.4", tcp_of_other])
        self.monkeypatch.setattr(hosts, "gather_text", lambda text, group, timeout=None: [text, next(answers)])
        self.monkeypatch.setattr(hosts.dist, "get_rank", lambda group: 0)
        return hosts.listen(object())  # type: ignore[arg-type]

    def test_ranks_of_several_hosts_listen_over_tcp_and_those_of_one_over_shared_memory(self) -> None:
        self.monkeypatch.setattr(hosts, "_candidates", lambda: ["10.1.2.3"])
        self.monkeypatch.setattr(_C, "TcpListener", lambda host, make=_C.TcpListener: make("127.0.0.1"))
        other = f"distca-tcp-1/10.1.2.4/80/{'0' * 32}"
        listener, addresses = self.listen(other)
        assert addresses == [listener.address, other]
        assert addresses[0].startswith("distca-tcp-1/")
        self.monkeypatch.setattr(
            hosts, "gather_text", lambda text, group, timeout=None: [text, _C.ShmListener().address]
        )
        listener, addresses = hosts.listen(object())  # type: ignore[arg-type]
        assert isinstance(listener, _C.ShmListener)
        assert addresses[0] == listener.address

    def test_a_rank_that_cannot_listen_is_an_error_on_all(self) -> None:
        self.monkeypatch.setenv(hosts.ADDRESS_VARIABLE, "192.0.2.1")
        other = f"distca-tcp-1/10.1.2.4/80/{'0' * 32}"
        with pytest.raises(distca.InvalidArgumentError, match=r"rank 0 cannot listen: 192\.0\.2\.1 is not an address"):
            self.listen(other)
        self.monkeypatch.setattr(hosts, "host_address", lambda group, timeout: "127.0.0.1")
        answers = iter([_C.ShmListener().address.replace("distca-shm-1/", "distca-shm-1/0"), "no socket"])
        self.monkeypatch.setattr(hosts, "gather_text", lambda text, group, timeout=None: [text, next(answers)])
        with pytest.raises(distca.InvalidArgumentError, match="rank 1 cannot listen: no socket; DISTCA_HOST_ADDRESS"):
            hosts.listen(object())  # type: ignore[arg-type]

    def test_a_host_whose_names_nobody_knows_is_reached_from_itself_alone(self) -> None:
        self.monkeypatch.setattr(hosts.socket, "getaddrinfo", _nobody_knows)
        self.monkeypatch.setenv("MASTER_ADDR", "nowhere")
        assert self.address([]) == "127.0.0.1"
        with pytest.raises(
            distca.InvalidArgumentError, match=r"the host of rank 0 has only the addresses 127\.0\.0\.1, which"
        ):
            self.address(["there|10.1.2.4"])


def _nobody_knows(*_: Any, **__: Any) -> None:
    raise socket.gaierror("Name or service not known")
