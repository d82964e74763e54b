"""The links: nothing above capacity, nothing before its cause, more bandwidth and earlier starts end nothing later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca.simulator.network import NEVER, Network, Traffic, last_served
from support.simulated import cluster

_TIMES = st.lists(st.integers(0, 50), min_size=4, max_size=4)
_BYTES = st.lists(st.integers(0, 3), min_size=16, max_size=16)
_UNIT = 1_000_000_000
_LATENCY_BETWEEN = 1e-5


def _matrix(cells: list[int]) -> torch.Tensor:
    matrix = torch.tensor(cells, dtype=torch.float64).reshape(4, 4) * _UNIT
    return matrix.fill_diagonal_(0)


def _seconds(times: list[int]) -> torch.Tensor:
    return torch.tensor(times, dtype=torch.float64) / 100


def _in_turn(arrivals: list[tuple[float, float]]) -> float:
    """The end of a queue that serves what comes one after the other."""
    now = -float("inf")
    for arrival, work in sorted(arrivals):
        now = max(now, arrival) + work
    return now


@given(_TIMES, st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_a_port_without_pause_ends_when_a_queue_ends(starts: list[int], work: list[int]) -> None:
    ended = last_served(torch.tensor(starts).double(), torch.tensor(work).double().unsqueeze(1))
    wanted = _in_turn([(s, w) for s, w in zip(starts, work, strict=True) if w])
    assert float(ended) == wanted


@given(_TIMES, _BYTES, _BYTES, st.booleans())
def test_no_port_carries_more_than_its_bandwidth(
    starts: list[int], first: list[int], second: list[int], nodes_bind: bool
) -> None:
    # Two nodes of two ranks; both calls together, between the first start and the last arrival.
    setup = cluster(4, 2, node_bandwidth=50e9 if nodes_bind else None)
    network, begin = Network(setup, 1), _seconds(starts)
    ends = [network.send(begin, Traffic.of(_matrix(cells), 2)) for cells in (first, second)]
    total = _matrix(first) + _matrix(second)
    end = torch.maximum(*ends)
    node = torch.arange(4) // 2
    outside = total * (node.unsqueeze(0) != node.unsqueeze(1))
    for bandwidth, matrix in ((400e9, total - outside), (40e9, outside)):
        for rank in range(4):
            if matrix[:, rank].any():
                senders = begin[matrix[:, rank] > 0]
                assert end[rank] - senders.min() >= matrix[:, rank].sum() / bandwidth
            if matrix[rank].any():
                assert end[matrix[rank] > 0].max() - begin[rank] >= matrix[rank].sum() / bandwidth
    if nodes_bind:
        for of_node in range(2):
            into = outside[:, node == of_node]
            if into.any():
                assert end[node == of_node].max() - begin[into.sum(1) > 0].min() >= into.sum() / 50e9


@given(_TIMES, _BYTES, _TIMES)
def test_rows_arrive_after_their_senders_start_the_receivers_credit_and_the_latency(
    starts: list[int], cells: list[int], credits: list[int]
) -> None:
    begin, credit, matrix = _seconds(starts), _seconds(credits), _matrix(cells)
    for ideal in (False, True):
        arrived = Network(cluster(4, 1), 1, ideal=ideal).send(begin, Traffic.of(matrix, 1), credit)
        for rank in range(4):
            sources = matrix[:, rank] > 0
            if not sources.any():
                assert arrived[rank] == NEVER
                continue
            assert arrived[rank] >= max(float(begin[sources].max()), float(credit[rank]))
            if not ideal:
                least = float((begin[sources] + matrix[sources, rank] / 40e9).max()) + _LATENCY_BETWEEN
                assert arrived[rank] >= least - 1e-12


@given(_TIMES, _BYTES, _BYTES, st.integers(0, 3), st.floats(1, 10))
def test_more_bandwidth_and_earlier_starts_end_nothing_later(
    starts: list[int], first: list[int], second: list[int], earlier: int, speed: float
) -> None:
    late = _seconds(starts)
    early = late.clone()
    early[earlier] = 0.0
    ends = []
    for setup, begin in ((cluster(4, 2), late), (cluster(4, 2, speed=speed), early)):
        network = Network(setup, 1)
        sent = network.send(begin, Traffic.of(_matrix(first), 2), credits=begin)
        through = network.ring(torch.tensor([[0, 1, 2, 3]]), begin, 1e9, "all_gather")
        ends.append([sent, through, network.send(begin, Traffic.of(_matrix(second), 2))])
    for slow, fast in zip(*ends, strict=True):
        assert bool((fast <= slow + 1e-12).all())


@given(_TIMES, _BYTES)
def test_the_ranks_of_a_node_may_change_places(starts: list[int], cells: list[int]) -> None:
    begin, matrix, order = _seconds(starts), _matrix(cells), torch.tensor([1, 0, 3, 2])
    setup = cluster(4, 2, node_bandwidth=50e9)
    there = Network(setup, 1).send(begin, Traffic.of(matrix, 2))
    permuted = Network(setup, 1).send(begin[order], Traffic.of(matrix[order][:, order], 2))
    assert permuted.tolist() == pytest.approx(there[order].tolist())


def test_many_senders_of_one_rank_wait_for_its_port() -> None:
    # By hand: three messages of 1 GB through one port of 40 GB/s, then 10 microseconds.
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[1:, 0] = _UNIT
    arrived = Network(cluster(4, 1), 1).send(torch.zeros(4, dtype=torch.float64), Traffic.of(matrix, 1))
    assert float(arrived[0]) == pytest.approx(3 / 40 + 1e-5)


def test_a_message_waits_for_the_credit_which_travels_itself() -> None:
    # By hand: credit after 1 s and 10 microseconds, then 1 GB at 40 GB/s, then 10 microseconds.
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[0, 1] = _UNIT
    zeros = torch.zeros(4, dtype=torch.float64)
    arrived = Network(cluster(4, 1), 1).send(zeros, Traffic.of(matrix, 1), credits=zeros + 1)
    assert arrived[1] - 1 == pytest.approx(1 / 40 + 2e-5)


def test_a_ring_takes_all_but_a_ranks_own_part_over_the_slower_link() -> None:
    # By hand: 8 GB gathered by 4 ranks, 6 GB each; two ranks of a node have two links of 40 GB/s; three steps.
    network = Network(cluster(4, 2), 1)
    through = network.ring(torch.tensor([[0, 1, 2, 3]]), torch.tensor([0.0, 0.0, 0.5, 0.0]).double(), 8e9, "all_gather")
    assert through.tolist() == pytest.approx([0.5 + 6 / 80 + 3e-5] * 4)
    inside = Network(cluster(4, 4), 1).ring(torch.tensor([[0, 1], [2, 3]]), torch.zeros(4).double(), 8e9, "all_gather")
    assert inside.tolist() == pytest.approx([4 / 400 + 1e-6] * 4)


_ONE_EACH = st.tuples(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4))


@given(_TIMES, st.lists(_ONE_EACH, min_size=1, max_size=3), _TIMES, st.booleans(), st.sampled_from([1, 2, 4]))
def test_one_peer_each_way_takes_the_time_of_the_general_path(
    starts: list[int], calls: list[tuple[list[int], list[int]]], credits: list[int], given: bool, per_node: int
) -> None:
    """Traffic whose peers are hidden takes the general path."""
    fast, general = Network(cluster(4, per_node), 1), Network(cluster(4, per_node), 1)
    for targets, numbers in calls:
        matrix = torch.zeros(4, 4, dtype=torch.float64)
        matrix[torch.arange(4), torch.tensor(targets)] = torch.tensor(numbers).double() * _UNIT
        matrix.fill_diagonal_(0)
        traffic, dense = Traffic.of(matrix, per_node), Traffic.of(matrix, per_node)
        vars(dense).update(peers_inside=None, peers_between=None)
        assert traffic.peers_inside is not None
        credit = _seconds(credits) if given else None
        arrived, wanted = fast.send(_seconds(starts), traffic, credit), general.send(_seconds(starts), dense, credit)
        assert torch.equal(arrived, wanted)


def test_a_rank_with_two_peers_has_no_fast_path() -> None:
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[0, 1] = matrix[0, 2] = _UNIT
    assert Traffic.of(matrix, 1).peers_between is None and Traffic.of(matrix.T.contiguous(), 1).peers_between is None
