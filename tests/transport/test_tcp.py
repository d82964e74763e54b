"""The control transport over TCP: the contract of words, and peers that leave, break off or send what no rank sends."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import distca
from support.processes import LIMIT, fault_of, held
from support.tcp_ranks import (
    ALL_BITS,
    ANSWER,
    FAREWELL,
    GOODBYE,
    IPV6,
    QUESTION,
    SIGNAL,
    WORDS,
    ByHand,
    group_of,
    in_threads,
    message,
)


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    before = held()
    yield
    assert held() == before


def until_gone(transport: Any, peer: int) -> tuple[int, bool]:
    deadline = time.monotonic() + LIMIT
    while (gone := transport.departed(peer)) is None:
        assert time.monotonic() < deadline, f"rank {peer} is not known to be gone"
    return gone


# ---- the contract


def test_what_was_sent_over_a_link_arrives_before_its_rank_is_known_to_have_left() -> None:
    group = group_of(2, latency=0.2)
    group[0].signal(1, 3, 7)
    group[0] = None  # it closes
    assert until_gone(group[1], 0) == (0, True)
    assert group[1].load(3) == 7


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_signals_and_published_words_are_seen_by_every_rank(ranks: int, host: str) -> None:
    group = group_of(ranks, host)
    for rank, one in enumerate(group):
        one.publish(40 + rank, ALL_BITS - rank)
        for peer in range(ranks):
            one.signal(peer, rank, 100 * rank + peer + 1)
    for rank, one in enumerate(group):
        for peer in range(ranks):
            assert one.wait(peer, 100 * peer + rank + 1, LIMIT)
            assert one.load(peer) == 100 * peer + rank + 1
            assert one.peek(peer, 40 + peer) == ALL_BITS - peer
            assert one.peek(peer, 41 + peer) == 0
        assert one.departed() is None


def test_a_signal_comes_after_what_its_rank_published_and_quiet_after_its_signals() -> None:
    group = group_of(2)
    for number in range(1, 200):
        group[0].publish(1, number)
        group[0].signal(1, 0, number)
        assert group[1].wait(0, number, LIMIT)
        assert group[1].peek(0, 1) == number
        group[1].signal(0, 2, number)
        group[1].quiet()
        assert group[0].load(2) == number


def test_many_signals_arrive_each_in_its_word_and_those_to_one_word_in_their_order() -> None:
    group = group_of(3)
    for number in range(1, 20_001):
        group[number % 2].signal(2, number % 2, number)
        group[number % 2].signal(2, 2 + number % 70, number)
    for one in group[:2]:
        one.quiet()
    assert [group[2].load(word) for word in (0, 1)] == [20_000, 19_999]
    last = {number % 70: number for number in range(1, 20_001)}
    assert [group[2].load(2 + word) for word in range(70)] == [last[word] for word in range(70)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_of_ranks_that_publish_and_then_peek_at_least_one_of_two_sees_the_other(ranks: int) -> None:
    group = group_of(ranks)
    rounds = 400
    start = threading.Barrier(ranks)

    def run(rank: int) -> list[list[int]]:
        seen = []
        for number in range(1, rounds + 1):
            start.wait(LIMIT)
            group[rank].publish(0, number)
            seen.append([group[rank].peek(peer, 0) for peer in range(ranks)])
        return seen

    seen = in_threads(*(lambda r=r: run(r) for r in range(ranks)))
    for number in range(rounds):
        for a in range(ranks):
            for b in range(a):
                assert number + 1 in (seen[a][number][b], seen[b][number][a]), (number, a, b)


@pytest.mark.parametrize("count", [0, 1, 4, WORDS])
def test_words_that_lie_together_are_peeked_at_once(count: int) -> None:
    group = group_of(2)
    for word in range(WORDS):
        group[0].publish(word, word * word + 1)
    first = WORDS - count
    assert group[1].peek_words(0, first, count) == (True, [word * word + 1 for word in range(first, WORDS)])


def test_a_peer_that_publishes_in_a_fixed_order_is_peeked_in_that_order() -> None:
    group = group_of(2)
    stop = threading.Event()

    def publish() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            for word in (3, 2, 1, 0):
                group[0].publish(word, number)

    def peek() -> None:
        try:
            for _ in range(1000):
                _, words = group[1].peek_words(0, 0, 4)
                assert all(later >= earlier for earlier, later in zip(words, words[1:], strict=False)), words
        finally:
            stop.set()

    assert in_threads(publish, peek) == [None, None]


def test_a_wait_ends_with_its_deadline_or_with_the_signal() -> None:
    group = group_of(2)
    assert not group[0].wait(0, 1, 0.01)
    came, _ = in_threads(lambda: group[0].wait(0, 7, LIMIT), lambda: group[1].signal(0, 0, 8))
    assert came
    assert not group[0].wait(0, 9, 0.0)


def test_ranks_and_words_that_do_not_exist_are_refused() -> None:
    group = group_of(2)
    for peer in (-1, 2):
        for call in (lambda p=peer: group[0].signal(p, 0, 1), lambda p=peer: group[0].peek(p, 0)):
            assert fault_of(call) == ("InvalidArgumentError", f"rank {peer} is not one of 2 ranks")
    for word in (-1, WORDS):
        for call in (
            lambda w=word: group[0].signal(1, w, 1),
            lambda w=word: group[0].signal(0, w, 1),
            lambda w=word: group[0].peek(1, w),
            lambda w=word: group[0].publish(w, 1),
            lambda w=word: group[0].load(w),
        ):
            assert fault_of(call) == ("InvalidArgumentError", f"signal word {word} does not exist; there are {WORDS}")
    assert fault_of(lambda: group[0].peek_words(1, WORDS - 2, 3))[0] == "InvalidArgumentError"
    assert group[1].peek(0, 0) == 0


# ---- peers that go


def test_a_rank_that_closes_has_left_in_good_order_and_its_last_words_stay_known() -> None:
    group = group_of(3)
    group[1].publish(5, 55)
    group[1].publish(6, 66)
    assert group[0].peek(1, 5) == 55
    for number in range(1, 1001):
        group[1].signal(0, 0, number)
    group[1] = None
    assert until_gone(group[0], 1) == until_gone(group[2], 1) == (1, True)
    assert group[0].departed() == (1, True)
    assert group[0].departed(2) is None
    assert group[0].load(0) == 1000
    assert (group[0].peek(1, 5), group[0].peek(1, 6), group[2].peek(1, 5)) == (55, 0, 0)
    group[0].signal(1, 0, 1)
    group[0].quiet()
    group[2].signal(0, 1, 3)
    assert group[0].wait(1, 3, LIMIT)


def test_ranks_that_close_at_once_leave_each_other_in_good_order() -> None:
    for _ in range(20):
        group = group_of(3)
        watcher = group.pop()

        def close(group: list[Any] = group) -> None:
            group.pop()

        in_threads(close, close)
        assert until_gone(watcher, 0) == (0, True)
        assert until_gone(watcher, 1) == (1, True)


def test_a_death_comes_before_a_goodbye_and_what_was_signalled_before_it_is_there() -> None:
    with ByHand() as one:
        one.socket.sendall(message(SIGNAL, 3, 33))
        one.socket.close()
        assert until_gone(one.peer, 1) == (1, False)
        assert one.peer.load(3) == 33
        assert one.peer.departed() == (1, False)


def test_a_message_that_comes_in_pieces_is_one_and_half_a_message_before_the_end_is_none() -> None:
    with ByHand() as one:
        data = message(SIGNAL, 1, 11) + message(QUESTION, 0, count=1) + message(SIGNAL, 2, 22)
        for part in (data[:5], data[5:30], data[30:60]):
            one.socket.sendall(part)
        assert one.peer.wait(1, 11, LIMIT)
        one.expect(ANSWER, 0, 0, 0)
        one.socket.close()
        assert until_gone(one.peer, 1) == (1, False)
        assert one.peer.load(2) == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        message(SIGNAL, WORDS, 1),
        message(SIGNAL, -1, 1),
        message(SIGNAL, -(2**63), 1),
        message(QUESTION, WORDS, count=1),
        message(QUESTION, -1, count=2),
        message(QUESTION, 0, count=0),
        message(QUESTION, 0, count=65),
        message(QUESTION, WORDS - 1, count=2),
        message(QUESTION, 2**63 - 1, count=64),
        message(ANSWER, 0, 1),
        message(0),
        message(6),
        message(2**32 - 1),
    ],
    ids=lambda data: str(struct.unpack("<IIqQ", data)),
)
def test_what_no_rank_sends_ends_the_connection_and_does_no_other_harm(nonsense: bytes) -> None:
    with ByHand() as one:
        one.peer.publish(2, 22)
        one.socket.sendall(nonsense + message(SIGNAL, 1, 11))
        one.expect_end()
        assert until_gone(one.peer, 1) == (1, False)
        assert [one.peer.load(word) for word in range(WORDS)] == [22 if word == 2 else 0 for word in range(WORDS)]


def test_an_answer_for_another_word_than_was_asked_for_ends_the_connection() -> None:
    with ByHand() as one:

        def answer() -> None:
            one.expect(QUESTION, 1, 7, 0)
            one.socket.sendall(message(ANSWER, 8, 88))

        assert in_threads(lambda: one.peer.peek(1, 7), answer)[0] == 0
        assert until_gone(one.peer, 1) == (1, False)


def test_a_peer_that_does_not_answer_is_not_waited_for_again_before_it_has() -> None:
    with ByHand() as one:
        assert one.peer.peek(1, 7) == 0
        one.peer.publish(3, 33)
        assert [one.peer.peek(1, word) for word in range(WORDS)] == [0] * WORDS
        assert one.peer.peek_words(1, 6, 2) == (False, [0, 0])
        one.expect(QUESTION, 1, 7, 0)
        one.socket.sendall(message(ANSWER, 7, 77) + message(SIGNAL, 0, 1))
        assert one.peer.wait(0, 1, LIMIT)

        def answer() -> None:
            one.expect(QUESTION, 1, 8, 0)
            one.socket.sendall(message(ANSWER, 8, 88))

        assert in_threads(lambda: one.peer.peek(1, 8), answer)[0] == 88
        one.socket.sendall(message(GOODBYE))
        one.expect(FAREWELL, 0, 0, 0)
        assert until_gone(one.peer, 1) == (1, True)
        assert [one.peer.peek(1, word) for word in (7, 8, 9)] == [77, 88, 0]
        assert one.peer.peek_words(1, 7, 3) == (False, [77, 88, 0])


def test_signals_to_a_peer_that_does_not_read_are_kept_up_to_a_limit_and_none_is_lost() -> None:
    with ByHand(read_buffer=4096) as one:
        sent = 0
        with pytest.raises(distca.PeerTimeoutError, match="rank 0 could not signal rank 1, which has read nothing"):
            for number in range(10_000_000):
                one.peer.signal(1, number % WORDS, number)
                sent += 1
        for number in range(sent):
            one.expect(SIGNAL, 0, number % WORDS, number)
        one.peer.signal(1, 0, 5)
        one.expect(SIGNAL, 0, 0, 5)
