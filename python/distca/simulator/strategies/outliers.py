"""Variable-length packing with delay of outliers: algorithm 1 of WLB-LLM.

Source: Wang et al., WLB-LLM, arXiv 2503.17924, section 4 (OSDI 2025). Documents from a threshold on are outliers. They
wait in a queue of their level until it has as many as the step has micro-batches. These then go out in the order of
their arrival, so that each micro-batch gets one. All documents of a step are packed, the longest first: into the
micro-batch with least work, or if that would become too long, into the shortest one, or otherwise into the next step.

What differs: after the last batch the queues are emptied into its step, so that every document is in some step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

#: Documents of each micro-batch of a step.
Packed = list[list[int]]


class OutlierQueues:
    """Queues of outliers by length.

    Args:
        thresholds: ascending; queue i has documents from ``thresholds[i]`` on and below the next threshold.
        count: how many documents leave a queue together: the micro-batches of a step.
    """

    def __init__(self, thresholds: Sequence[int], count: int) -> None:
        self._thresholds, self._count = sorted(thresholds), count
        self._queues: list[deque[int]] = [deque() for _ in thresholds]

    @property
    def waiting(self) -> list[list[int]]:
        """The documents that wait in each queue, the first to arrive first."""
        return [list(queue) for queue in self._queues]

    def pass_through(self, documents: Sequence[int]) -> list[int]:
        """Takes in the outliers of a batch. Returns the others, and the outliers whose time has come."""
        ready = []
        for length in documents:
            level = sum(length >= threshold for threshold in self._thresholds) - 1
            if level < 0:
                ready.append(length)
            else:
                self._queues[level].append(length)
        for queue in self._queues:
            if len(queue) >= self._count:
                ready += [queue.popleft() for _ in range(self._count)]
        return ready

    def empty(self) -> list[int]:
        """Takes out all that wait."""
        left = [length for queue in self._queues for length in queue]
        for queue in self._queues:
            queue.clear()
        return left


def pack_step(
    documents: Sequence[int], count: int, longest: int, work: Callable[[int], float]
) -> tuple[Packed, list[int]]:
    """Packs the documents of a step.

    Args:
        documents: lengths.
        count: number of micro-batches.
        longest: the most tokens of a micro-batch.
        work: of a document.

    Returns:
        The documents of each micro-batch, and those that do not fit.
    """
    packed: Packed = [[] for _ in range(count)]
    works, tokens, left = [0.0] * count, [0] * count, []
    for length in sorted(documents, reverse=True):
        least = works.index(min(works))
        if tokens[least] + length > longest:
            least = tokens.index(min(tokens))
        if tokens[least] + length > longest:
            left.append(length)
            continue
        packed[least].append(length)
        works[least] += work(length)
        tokens[least] += length
    return packed, left


def pack(
    batches: Sequence[Sequence[int]],
    count: int,
    longest: int,
    work: Callable[[int], float],
    thresholds: Sequence[int] = (),
) -> list[Packed]:
    """Packs a stream of batches, each into a step. The last one is followed by more steps while documents are left.

    Args:
        batches: the documents of each batch.
        count: micro-batches of a step.
        longest: the most tokens of a micro-batch; at least the longest document.
        work: of a document.
        thresholds: from which lengths on documents wait, by level; none: nothing is delayed.
    """
    queues = OutlierQueues(thresholds, count)
    steps: list[Packed] = []
    left: list[int] = []
    for number, batch in enumerate(batches):
        ready = left + queues.pass_through(batch)
        if number == len(batches) - 1:
            ready += queues.empty()
        packed, left = pack_step(ready, count, longest, work)
        steps.append(packed)
    while left:
        packed, left = pack_step(left, count, longest, work)
        steps.append(packed)
    return steps
