"""The links of a cluster: ports that are shared by what is under way, one-sided messages, and rings.

A port serves what comes to it without a pause, and never above its bandwidth. Messages of an earlier call go first.
Every time here is a maximum of sums of earlier times, bytes over bandwidth, and latencies, in an order that does not
depend on these times. Therefore more bandwidth, less latency or an earlier start can make nothing end later.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from distca.simulator.setup import Cluster, LinkClass

NEVER = -float("inf")
"""The time of what does not happen, for maxima."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Traffic of one link class in which each rank sends to one rank at most, and receives from one at most.

    Attributes:
        target: ``[ranks]`` to whom each rank sends; any rank if it sends nothing.
        source: ``[ranks]`` from whom each rank receives; any rank if it receives nothing.
        sent, received: ``[ranks]`` bytes, float64.
    """

    target: torch.Tensor
    source: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor

    @classmethod
    def of(cls, blocks: torch.Tensor) -> Peers | None:
        """The peers of ``[nodes, n, n]`` bytes from rank to rank of each block, or None if a rank has several."""
        some = blocks > 0
        if bool((some.sum(-1) > 1).any()) or bool((some.sum(-2) > 1).any()):
            return None
        first = torch.arange(len(blocks)).unsqueeze(1) * blocks.shape[-1]
        target, source = (first + some.int().argmax(dim) for dim in (-1, -2))
        return cls(target.reshape(-1), source.reshape(-1), blocks.sum(-1).reshape(-1), blocks.sum(-2).reshape(-1))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one call moves between homes, by link class.

    Attributes:
        inside: ``[nodes, n, n]`` bytes from rank to rank of a node of n, float64.
        between: ``[ranks, ranks]`` bytes between nodes, or None if there are none.
        received: ``[ranks]`` bytes that a rank gets.
        sent: ``[ranks]`` bytes that a rank sends.
    """

    inside: torch.Tensor
    between: torch.Tensor | None
    received: torch.Tensor
    sent: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, per_node: int) -> Traffic:
        """The traffic of a matrix ``[ranks, ranks]`` of bytes from rank to rank, of nodes of `per_node` ranks."""
        ranks = len(matrix)
        nodes = ranks // per_node
        blocks = matrix.reshape(nodes, per_node, nodes, per_node)
        index = torch.arange(nodes)
        inside = blocks[index, :, index, :].clone()
        outside = matrix.clone().reshape(nodes, per_node, nodes, per_node)
        outside[index, :, index, :] = 0.0
        between = outside.reshape(ranks, ranks)
        return cls(inside, between if bool(between.any()) else None, matrix.sum(0), matrix.sum(1))

    @functools.cached_property
    def any(self) -> bool:
        """Whether anything moves."""
        return bool(self.received.any())

    @functools.cached_property
    def any_inside(self) -> bool:
        """Whether anything moves inside a node."""
        return bool(self.inside.any())

    @functools.cached_property
    def peers_inside(self) -> Peers | None:
        """What moves inside nodes, if each rank has one peer at most in each direction."""
        return Peers.of(self.inside)

    @functools.cached_property
    def peers_between(self) -> Peers | None:
        """What moves between nodes, if each rank has one peer at most in each direction."""
        return None if self.between is None else Peers.of(self.between.unsqueeze(0))

    @property
    def signals(self) -> Traffic:
        """The same messages with one byte each."""
        between = None if self.between is None else (self.between > 0).double()
        received, sent = (self.received > 0).double(), (self.sent > 0).double()
        return Traffic((self.inside > 0).double(), between, received, sent)

    @functools.cached_property
    def bytes_inside(self) -> float:
        """Bytes between ranks of a node."""
        return float(self.inside.sum())

    @functools.cached_property
    def bytes_between(self) -> float:
        """Bytes between nodes."""
        return 0.0 if self.between is None else float(self.between.sum())


def last_served(starts: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """When servers that never pause have served everything.

    Work that comes at time a is over no earlier than a plus all work that comes at a or later. The latest of these
    times is the end, whatever the order of service.

    Args:
        starts: ``[..., n]`` seconds at which the work of n sources comes.
        work: ``[..., n, m]`` seconds of work from each source for each of m servers.

    Returns:
        ``[..., m]`` seconds; NEVER for a server without work.
    """
    sorted_starts, order = starts.sort(dim=-1, descending=True)
    by_server = work.transpose(-1, -2)  # sums run along memory, which takes a third of the time
    sorted_work = by_server.gather(-1, order.unsqueeze(-2).expand_as(by_server))
    ends = sorted_work.cumsum(-1).add_(sorted_starts.unsqueeze(-2))
    return ends.masked_fill_(sorted_work <= 0, NEVER).amax(-1)


class _Ports:
    """The ports of one link class: until when each is taken."""

    def __init__(self, link: LinkClass, ranks: int) -> None:
        self.link = link
        self.out, self.into = torch.zeros(ranks, dtype=torch.float64), torch.zeros(ranks, dtype=torch.float64)

    def send(self, starts: torch.Tensor, credits: torch.Tensor | None, matrix: torch.Tensor) -> torch.Tensor:
        """Takes the ports for a matrix ``[..., n, n]`` of bytes. Returns ``[..., n]`` when each rank has received all.

        NEVER for a rank that receives nothing. A message leaves at its sender's start, and not before the credit.
        """
        shape = starts.shape
        work = matrix / self.link.bandwidth
        out, into = self.out.view(shape), self.into.view(shape)
        ready = torch.full_like(starts, NEVER) if credits is None else credits
        sent = torch.maximum(out, starts) + work.sum(-1)
        if credits is not None:
            sent = torch.maximum(sent, last_served(credits, work.transpose(-1, -2)))
        sends = work.sum(-1) > 0
        self.out = torch.where(sends, sent, out).reshape(-1)
        received = torch.maximum(into, ready) + work.sum(-2)
        received = torch.maximum(received, last_served(starts, work))
        last_sender = torch.where(work > 0, sent.unsqueeze(-1), NEVER).amax(-2)
        received = torch.maximum(received, last_sender)
        receives = work.sum(-2) > 0
        self.into = torch.where(receives, received, into).reshape(-1)
        return torch.where(receives, received + self.link.latency, NEVER)

    def pass_on(self, starts: torch.Tensor, credits: torch.Tensor | None, peers: Peers) -> torch.Tensor:
        """The same as `send`, where each rank has one peer at most in each direction. All tensors are ``[ranks]``."""
        leaves, comes = peers.sent / self.link.bandwidth, peers.received / self.link.bandwidth
        sent, begin = torch.maximum(self.out, starts) + leaves, self.into
        if credits is not None:
            sent, begin = torch.maximum(sent, credits[peers.target] + leaves), torch.maximum(begin, credits)
        self.out = torch.where(leaves > 0, sent, self.out)
        received = torch.maximum(torch.maximum(begin, starts[peers.source]) + comes, sent[peers.source])
        receives = comes > 0
        self.into = torch.where(receives, received, self.into)
        return torch.where(receives, received + self.link.latency, NEVER)


class Network:
    """The ports of all homes: ranks of one tensor group are one home, because they do the same at the same time.

    Attributes:
        ranks: number of homes.
        per_node: homes of a node.
        bytes_inside, bytes_between: what has travelled, of one rank of each tensor group.
        ideal: whether links take no time, to see what they cost.
        rows_are_free: whether rows of attention take no time: queries, keys, results and gathered keys.
        signal_only: whether every message from rank to rank has one byte, to see what rows cost.
    """

    def __init__(
        self, cluster: Cluster, tensor: int, *, ideal: bool = False, free_rows: bool = False, signal_only: bool = False
    ) -> None:
        self.ranks = cluster.ranks // tensor
        self.per_node = min(cluster.ranks_per_node, cluster.ranks) // tensor
        self.ideal, self.rows_are_free, self.signal_only = ideal, ideal or free_rows, signal_only
        self._inside, self._between = _Ports(cluster.inside, self.ranks), _Ports(cluster.between, self.ranks)
        self._nodes: _Ports | None = None
        if cluster.between.node_bandwidth is not None:
            of_node = dataclasses.replace(cluster.between, bandwidth=cluster.between.node_bandwidth / tensor)
            self._nodes = _Ports(of_node, self.ranks // self.per_node)
        self.bytes_inside = self.bytes_between = 0.0

    def send(
        self, starts: torch.Tensor, traffic: Traffic, credits: torch.Tensor | None = None, *, rows: bool = False
    ) -> torch.Tensor:
        """Starts the messages of a call.

        Args:
            starts: ``[ranks]`` seconds from which each rank sends.
            traffic: the bytes.
            credits: ``[ranks]`` seconds from which each rank may be written to; None: at once.
            rows: whether these are rows of attention.

        Returns:
            ``[ranks]`` seconds at which a rank has received all that it gets; NEVER if that is nothing.
        """
        if not traffic.any:
            return torch.full_like(starts, NEVER)
        if self.signal_only:
            traffic = traffic.signals
        self.bytes_inside += traffic.bytes_inside
        self.bytes_between += traffic.bytes_between
        if self._is_free(rows):
            return self._ideal(starts, traffic, credits)
        grid = (self.ranks // self.per_node, self.per_node)
        arrived = torch.full_like(starts, NEVER)
        if traffic.any_inside:
            there = None if credits is None else credits + self._inside.link.latency
            if traffic.peers_inside is not None:
                arrived = self._inside.pass_on(starts, there, traffic.peers_inside)
            else:
                of_nodes = None if there is None else there.view(grid)
                arrived = self._inside.send(starts.view(grid), of_nodes, traffic.inside).reshape(-1)
        if traffic.between is not None:
            there = None if credits is None else credits + self._between.link.latency
            if traffic.peers_between is not None:
                passed = self._between.pass_on(starts, there, traffic.peers_between)
            else:
                passed = self._between.send(starts, there, traffic.between)
            arrived = torch.maximum(arrived, passed)
            if self._nodes is not None:
                arrived = torch.maximum(arrived, self._through_nodes(starts, there, traffic.between))
        return arrived

    def granted(self, credits: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        """When each sender knows that all receivers of its rows have given credit; NEVER if it sends nothing."""
        latency = 0.0 if self.rows_are_free else self._inside.link.latency
        by_node = (credits + latency).view(-1, 1, self.per_node)
        known = torch.where(traffic.inside > 0, by_node, NEVER).amax(-1).reshape(-1)
        if traffic.between is not None:
            latency = 0.0 if self.rows_are_free else self._between.link.latency
            known = torch.maximum(known, torch.where(traffic.between > 0, credits + latency, NEVER).amax(-1))
        return known

    def knows(self, groups: torch.Tensor, what: str) -> bool:
        """Whether there are rates of this kind of ring for these groups."""
        return bool(self._link_over(self._nodes_of(groups)).rates_of(what))

    def _link_over(self, nodes: int) -> LinkClass:
        return (self._between if nodes > 1 else self._inside).link

    def _nodes_of(self, groups: torch.Tensor) -> int:
        return torch.unique(groups[0] // self.per_node).numel()

    def ring(
        self, groups: torch.Tensor, starts: torch.Tensor, num_bytes: float, what: str, *, rows: bool = False
    ) -> torch.Tensor:
        """An all-gather or a reduce-scatter of ``num_bytes`` in all by rings, as many as a group has ranks on a node.

        Every rank sends all but its own part. A ring begins when all its ranks have come.

        Args:
            groups: ``[number, n]`` the ranks of each group.
            starts: ``[ranks]`` seconds at which each rank comes.
            num_bytes: bytes of the whole, gathered or reduced.
            what: one of `COLLECTIVES`; of an all-reduce this is one half.
            rows: whether these are rows of attention.

        Returns:
            ``[ranks]`` seconds at which each rank is through; ranks of no group keep their start.
        """
        number, size = groups.shape
        if size == 1 or num_bytes == 0:
            return starts
        nodes = self._nodes_of(groups)
        ports = [self._inside] + ([self._between] if nodes > 1 else [])
        travels = num_bytes * (size - 1) / size
        share = travels * number * size
        crossing = share * nodes / size if nodes > 1 else 0.0
        self.bytes_between += crossing
        self.bytes_inside += share - crossing
        begin = starts[groups].amax(-1)
        seconds = 0.0
        free = self._is_free(rows)
        if not free:
            for port in ports:
                begin = torch.maximum(begin, torch.maximum(port.out[groups], port.into[groups]).amax(-1))
            if nodes > 1 and self._nodes is not None:
                taken = torch.maximum(self._nodes.out, self._nodes.into)
                begin = torch.maximum(begin, taken[groups // self.per_node].amax(-1))
            rates = [self._inside.link.bandwidth] * (size > nodes)
            if nodes > 1:
                rates.append(self._between.link.bandwidth * (size // nodes))
                rates += [self._nodes.link.bandwidth / self.per_node * (size // nodes)] if self._nodes else []
            seconds = self._link_over(nodes).ring_seconds(travels, min(rates), size - 1, what)
        end = (begin + seconds).unsqueeze(-1).expand(groups.shape)
        result = starts.clone()
        result[groups] = end
        if not free:
            for port in ports:
                port.out, port.into = port.out.clone(), port.into.clone()
                port.out[groups] = end
                port.into[groups] = end
            if nodes > 1 and self._nodes is not None:
                of_nodes = torch.zeros_like(self._nodes.out)
                of_nodes.index_reduce_(0, (groups // self.per_node).reshape(-1), end.reshape(-1), "amax")
                self._nodes.out = torch.maximum(self._nodes.out, of_nodes)
                self._nodes.into = torch.maximum(self._nodes.into, of_nodes)
        return result

    def among_tensor_ranks(self, starts: torch.Tensor, num_bytes: torch.Tensor, steps: int) -> torch.Tensor:
        """Rings of the tensor ranks inside each home.

        Args:
            starts: ``[ranks]`` seconds at which each home comes.
            num_bytes: ``[ranks]`` bytes that each tensor rank sends and receives.
            steps: how many steps the rings have.

        Returns:
            ``[ranks]`` seconds at which each home is through.
        """
        self.bytes_inside += float(num_bytes.sum())
        if self.ideal:
            return starts
        ports = self._inside
        takes_part = num_bytes > 0
        end = torch.maximum(starts, torch.maximum(ports.out, ports.into)) + num_bytes / ports.link.bandwidth
        ports.out, ports.into = torch.where(takes_part, end, ports.out), torch.where(takes_part, end, ports.into)
        return torch.where(takes_part, end + steps * ports.link.latency, starts)

    def _is_free(self, rows: bool) -> bool:
        return self.rows_are_free if rows else self.ideal

    def _ideal(self, starts: torch.Tensor, traffic: Traffic, credits: torch.Tensor | None) -> torch.Tensor:
        """When all senders of a rank have started, and it has given credit: messages themselves take no time."""
        sent = torch.full_like(starts, NEVER)
        if traffic.any_inside:
            by_node = starts.view(self.ranks // self.per_node, self.per_node)
            sent = torch.where(traffic.inside > 0, by_node.unsqueeze(-1), NEVER).amax(-2).reshape(-1)
        if traffic.peers_between is not None:
            peers = traffic.peers_between
            sent = torch.maximum(sent, torch.where(peers.received > 0, starts[peers.source], NEVER))
        elif traffic.between is not None:
            sent = torch.maximum(sent, torch.where(traffic.between > 0, starts.unsqueeze(-1), NEVER).amax(0))
        if credits is not None:
            sent = torch.where(traffic.received > 0, torch.maximum(sent, credits), NEVER)
        return sent

    def _through_nodes(self, starts: torch.Tensor, credits: torch.Tensor | None, between: torch.Tensor) -> torch.Tensor:
        """When each rank has what comes to its node, if the ports of the nodes are what binds."""
        assert self._nodes is not None
        ports, nodes = self._nodes, self.ranks // self.per_node
        grid = (nodes, self.per_node)
        work = between / ports.link.bandwidth
        to_node = work.reshape(self.ranks, nodes, self.per_node).sum(-1)  # from each rank to each node
        from_node = work.reshape(nodes, self.per_node, self.ranks).sum(1).T  # to each rank from each node
        into, out = to_node.sum(0), from_node.sum(0)
        sent = torch.maximum(ports.out, starts.view(grid).amin(-1)) + out
        by_rank = work.sum(1).view(*grid, 1)
        sent = torch.maximum(sent, last_served(starts.view(grid), by_rank).squeeze(-1))
        if credits is not None:
            sent = torch.maximum(sent, last_served(credits, from_node))
        received = torch.maximum(torch.maximum(ports.into + into, last_served(starts, to_node)), ports.into)
        pairs = to_node.reshape(nodes, self.per_node, nodes).sum(1)
        received = torch.maximum(received, torch.where(pairs > 0, sent.unsqueeze(-1), NEVER).amax(0))
        ports.out = torch.where(out > 0, sent, ports.out)
        ports.into = torch.where(into > 0, received, ports.into)
        arrived = (received + ports.link.latency).repeat_interleave(self.per_node)
        return torch.where(between.sum(0) > 0, arrived, NEVER)
