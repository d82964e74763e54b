"""The schedule of Megatron's hybrid context parallelism: which ranks compute which documents, in which rounds.

Source: Megatron-core 0.16.1, ``pipeline_parallel/hybrid_cp_schedule.py``, ``BalancedCPScheduler``. A document needs as
many ranks as hold it with a given most tokens a rank, rounded up to a power of two. Its load on each of them is its
squared length over their number.

What differs: groups are made of neighbouring ranks in the order in which they are formed, which is what Megatron's
schedule comes to. The number of ranks is a power of two.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

#: Megatron's slack of a bucket over its share, and of the loads of a round.
BUCKET_SLACK = 1.1
LOAD_SLACK = 0.05


@dataclasses.dataclass
class Group:
    """Neighbouring ranks that compute the same documents, one after the other.

    Attributes:
        size: number of ranks, a power of two.
        documents: numbers of the documents.
        load: of each rank.
    """

    size: int
    documents: list[int]
    load: float


def ranks_needed(length: int, most_tokens: int) -> int:
    """The power of two of ranks that a document takes with so many tokens on a rank at most."""
    return 1 << (-(-length // most_tokens) - 1).bit_length()


def schedule(lengths: Sequence[int], ranks: int, most_tokens: int) -> list[list[Group]]:
    """All rounds. The groups of a round have the ranks in order, and all of them; ranks wait for each other after it.

    Args:
        lengths: of the documents, in tokens.
        ranks: a power of two, at least what the longest document needs.
        most_tokens: of a document on a rank.

    Examples:
        >>> from distca.simulator.strategies.hybrid_schedule import schedule
        >>> [(group.size, group.documents) for group in schedule([8, 4, 4], 4, most_tokens=4)[0]]
        [(2, [0]), (1, [1]), (1, [2])]
    """
    waiting = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    rounds = []
    while waiting:
        groups, waiting = _round(waiting, lengths, ranks, most_tokens)
        rounds.append(groups)
    return rounds


def _round(
    waiting: Sequence[int], lengths: Sequence[int], ranks: int, most_tokens: int
) -> tuple[list[Group], list[int]]:
    """The groups of the next round, and the documents that are left."""
    needed = {document: ranks_needed(lengths[document], most_tokens) for document in waiting}
    loads = {document: lengths[document] ** 2 / needed[document] for document in waiting}
    buckets = _buckets(waiting, needed, loads)
    groups: list[Group] = []
    first_needed, balance_counts = None, False
    while buckets:
        free = ranks - sum(group.size for group in groups)
        bucket = next((b for b in buckets if b and _has_place(needed[b[0]], groups, free)), None)
        if bucket is None:
            break
        document = bucket.popleft()
        size = needed[document]
        if size <= free:
            groups.append(Group(size, [document], loads[document]))
        else:
            group = min((group for group in groups if group.size == size), key=lambda group: group.load)
            group.documents.append(document)
            group.load += loads[document]
        while buckets and not buckets[0]:
            buckets.popleft()
        first_needed = first_needed or size
        balance_counts = balance_counts or size < first_needed
        if balance_counts and buckets and _slack(groups, ranks) <= LOAD_SLACK:
            break
    left = [document for bucket in buckets for document in bucket]
    left += _trim(groups, loads, ranks)
    _fill(groups, ranks)
    return groups, left


def _has_place(size: int, groups: Sequence[Group], free: int) -> bool:
    """Whether there is a group of that size, or room for a new one."""
    return size <= free or any(group.size == size for group in groups)


def _buckets(waiting: Sequence[int], needed: dict[int, int], loads: dict[int, float]) -> deque[deque[int]]:
    """Runs of documents with similar load, as many as there are sizes of groups.

    Only the first document of each bucket is a candidate for the next place. A bucket also ends where so few documents
    are left that the buckets to come need them.
    """
    wanted = len({needed[document] for document in waiting})
    share = sum(loads[document] for document in waiting) / wanted
    buckets: deque[deque[int]] = deque([deque()])
    load = 0.0
    for number, document in enumerate(waiting):
        closed = len(buckets) - 1
        few_left = len(waiting) - number <= wanted - 2 * closed  # Megatron takes closed buckets off twice
        if buckets[-1] and (load + loads[document] > BUCKET_SLACK * share or few_left):
            buckets.append(deque())
            load = 0.0
        buckets[-1].append(document)
        load += loads[document]
    return buckets


def _slack(groups: Sequence[Group], ranks: int) -> float:
    """Largest load less the smallest, over the largest. A rank of no group has no load."""
    largest = max(group.load for group in groups)
    covered = sum(group.size for group in groups) == ranks
    smallest = min(group.load for group in groups) if covered else 0.0
    return (largest - smallest) / largest


def _trim(groups: Sequence[Group], loads: dict[int, float], ranks: int) -> list[int]:
    """Takes the last document off the group with most load, as long as the loads are then nearer to each other."""
    taken: list[int] = []
    while sum(group.size for group in groups) == ranks and _slack(groups, ranks) > LOAD_SLACK:
        highest = max(groups, key=lambda group: group.load)
        if len(highest.documents) == 1:
            break
        load = loads[highest.documents[-1]]
        others = [group.load for group in groups if group is not highest] + [highest.load - load]
        if max(others) - min(others) >= highest.load - min(group.load for group in groups):
            break
        highest.load -= load
        taken.append(highest.documents.pop())
    return taken


def _fill(groups: Sequence[Group], ranks: int) -> None:
    """Doubles the first of the smallest groups until no rank is without work."""
    while sum(group.size for group in groups) < ranks:
        smallest = min(groups, key=lambda group: group.size)
        smallest.size *= 2
        smallest.load /= 2
