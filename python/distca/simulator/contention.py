"""Programs on homes that slow each other down, because the ranks of a node share its memory (`Device.contention`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.simulator.case import Program
from distca.simulator.machine import Deadline, Event, Machine
from distca.simulator.network import Network
from distca.simulator.setup import Cluster


def played(
    program: Program,
    cluster: Cluster,
    tensor: int = 1,
    *,
    record: bool = False,
    even: bool = False,
    deadline: Deadline | None = None,
    free_rows: bool = False,
    ideal: bool = False,
) -> Machine:
    """Runs a program on the homes of a cluster. Where homes slow each other down, it runs twice.

    The first run is that of homes that do not. It says with how many others each home computes at the same time, and
    thus how long its parts take in the second.

    Args:
        program: what runs.
        cluster: what it runs on.
        tensor: tensor ranks of a home.
        record, even, deadline: those of `Machine`.
        free_rows, ideal: those of `Network`.
    """

    def machine(record: bool, paces: Sequence[torch.Tensor] | None = None) -> Machine:
        network = Network(cluster, tensor, free_rows=free_rows, ideal=ideal)
        made = Machine(network, cluster.device, record=record, even=even, deadline=deadline, paces=paces)
        program.play(made)
        return made

    if cluster.device.contention == 1:
        return machine(record)
    alone = machine(record=True)
    shares = shares_beside(alone.events, max(1, cluster.ranks_per_node // tensor))
    return machine(record, [1 + (cluster.device.contention - 1) * share for share in shares])


def shares_beside(events: Sequence[Event], per_node: int) -> list[torch.Tensor]:
    """For dense parts and attention, in their order: the mean share of their time for which others of the node compute.

    Args:
        events: of a program. All but waits is computation.
        per_node: homes of a node.

    Returns:
        Tensors ``[homes]``, from 0 to 1: 0 if all others of the node wait meanwhile, 1 if all of them compute.
    """
    busy = [event for event in events if event.what != "wait"]
    begin, end = (torch.stack([getattr(event, side) for event in busy]).T.contiguous() for side in ("begin", "end"))
    before = (end - begin).cumsum(1) - (end - begin)

    def computed(home: int, until: torch.Tensor) -> torch.Tensor:
        """Seconds for which a home has computed until these times."""
        at = (torch.searchsorted(begin[home], until, right=True) - 1).clamp(min=0)
        return before[home][at] + (torch.minimum(until, end[home][at]) - begin[home][at]).clamp(min=0)

    paced = torch.tensor([number for number, event in enumerate(busy) if event.what in ("dense", "attention")])
    shares = torch.zeros(len(paced), begin.shape[0], dtype=torch.float64)
    for home in range(begin.shape[0]):
        node = range(home // per_node * per_node, min((home // per_node + 1) * per_node, begin.shape[0]))
        first, last = begin[home][paced], end[home][paced]
        for other in node:
            if other != home:
                shares[:, home] += (computed(other, last) - computed(other, first)) / (len(node) - 1)
        shares[:, home] = torch.where(last > first, shares[:, home] / (last - first), 0.0)
    return list(shares)
