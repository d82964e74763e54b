"""`PipelinePlansAhead`: iterations of a pipeline with their plans, prepared one iteration ahead."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from distca.arguments import is_whole
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.pipeline.plans import PipelinePlans, checked_stages
from distca.planner.ahead import Ahead
from distca.planner.exchange import ENDED, Exchange, GatheredSteps, checked_lengths
from distca.planner.layout import Layout

Batch = TypeVar("Batch")
_NAME = "PipelinePlansAhead"


class PipelinePlansAhead(Ahead[list[Batch] | None, PipelinePlans], Generic[Batch]):
    """Iterates over iterations of a pipeline: yields `(batches, plans)`, and prepares the next pair in a thread.

    The plans of an iteration need the lengths of all its micro-batches. Only the ranks of one stage know them, as a
    rule the first stage, which reads the tokens. They tell all ranks of all stages, over a gloo group that the calling
    thread makes here. Therefore construction, iteration and closing are collective. Every rank plans for itself while
    the iteration before is computed::

        with PipelinePlansAhead(
            loader if stage == 0 else None, heads=heads, stages=stages, lengths=lengths, microbatches=8, context=context
        ) as iterations:
            for batches, plans in iterations:
                losses = Ticks(plans, context=context).run(...)

    The pass ends on all ranks before the first iteration for which one of the loaders has too few batches left. Batches
    that other loaders have left are dropped.

    The next iteration raises an exception of the loader, of `lengths` or of planning, and the other ranks then raise a
    PeerLeftError that names the rank. To stop the thread, use it as a context manager or call `close()`. After a plain
    `break` the thread stops when the object is dropped. Each `iter()` begins a new pass over the loader.

    Args:
        loader: the micro-batches of this rank, one after the other, or None for a rank that loads nothing. A rank of
            another stage may load as well, for example the labels; its batches must have the documents of the rank in
            its place in the loading stage.
        heads: head shape and dtype of the layers.
        stages: for each stage its ranks, as in `PipelinePlans`.
        lengths: the lengths of the whole documents in a batch, in the order of its rows. The thread calls it and the
            loader, one call at a time.
        microbatches: micro-batches of an iteration.
        loading_stage: number of the stage whose ranks tell the lengths.
        group: the process group of all ranks of all stages; by default all processes. An `Exchange` over such a group
            is used as it is.
        options: the other arguments of `PipelinePlans`, such as ``layers``, ``chunks`` and ``context``.

    Yields:
        The batches of an iteration, as many as there are micro-batches, or None without a loader; and its plans.

    Raises:
        InvalidArgumentError: `stages` is wrong as in `PipelinePlans`, another number is out of range, or the group has
            another number of ranks than the stages.
    """

    def __init__(
        self,
        loader: Iterable[Batch] | None,
        *,
        heads: Heads,
        stages: Sequence[Sequence[int]],
        lengths: Callable[[Batch], Sequence[int]],
        microbatches: int,
        loading_stage: int = 0,
        group: dist.ProcessGroup | Exchange | None = None,
        **options: Any,
    ) -> None:
        stages = checked_stages(_NAME, stages)
        if not is_whole(microbatches, 1):
            raise InvalidArgumentError(f"{_NAME}: microbatches = {microbatches!r}; a positive integer is expected")
        if not is_whole(loading_stage, 0, len(stages) - 1):
            raise InvalidArgumentError(
                f"{_NAME}: loading_stage = {loading_stage!r}; 0 to {len(stages) - 1} are allowed"
            )
        members = group.group if isinstance(group, Exchange) else group
        rank, num_ranks = (dist.get_rank(members), dist.get_world_size(members)) if dist.is_initialized() else (0, 1)
        if num_ranks != sum(map(len, stages)):
            raise InvalidArgumentError(
                f"{_NAME}: the stages have {sum(map(len, stages))} ranks, the group has {num_ranks}"
            )
        self._loader, self._lengths, self._microbatches, self._rank = loader, lengths, microbatches, rank
        self._stages, self._loading_stage = stages, loading_stage
        super().__init__(
            group if isinstance(group, Exchange) else Exchange(group),
            functools.partial(PipelinePlans, heads=heads, stages=stages, rank=rank, **options),
        )

    def _steps(self) -> _Iterations[Batch]:
        assert self._exchange is not None
        of_stage = self._stages[self._loading_stage]
        place = next(ranks.index(self._rank) for ranks in self._stages if self._rank in ranks)
        load = _Loading(self._loader, self._lengths, self._microbatches)
        return _Iterations(self._exchange, load, of_stage, self._rank, of_stage[place])


class _Loading(Generic[Batch]):
    """The micro-batches of a rank, an iteration at a time."""

    def __init__(
        self, loader: Iterable[Batch] | None, lengths: Callable[[Batch], Sequence[int]], microbatches: int
    ) -> None:
        self.loader, self.microbatches = loader, microbatches
        self._lengths = lengths
        self._batches: Iterator[Batch] | None = None

    def next(self) -> list[tuple[Batch, list[int]]] | None:
        """The batches of an iteration, each with its lengths; None if the loader has too few left."""
        if self._batches is None:
            assert self.loader is not None
            self._batches = iter(self.loader)
        batches = list(itertools.islice(self._batches, self.microbatches))
        if len(batches) < self.microbatches:
            return None
        return [(batch, checked_lengths(_NAME, self._lengths(batch))) for batch in batches]


class _Iterations(GatheredSteps[list[Batch] | None, list[Layout]]):
    """Iterations until one loader has ended.

    A rank of the loading stage tells, for each micro-batch, the number of its documents and then their lengths. The
    others tell nothing.
    """

    def __init__(
        self, exchange: Exchange, loading: _Loading[Batch], of_stage: list[int], rank: int, place: int
    ) -> None:
        """`place` is the rank of the loading stage whose rows this rank has."""
        super().__init__(exchange, _NAME)
        self._loading, self._of_stage, self._rank, self._place = loading, of_stage, rank, place
        self._loaded: list[list[int]] | None = None

    def _load(self) -> tuple[list[Batch] | None, list[int] | None]:
        if self._loading.loader is None:
            if self._rank in self._of_stage:
                raise InvalidArgumentError(
                    f"{_NAME}: rank {self._rank} has no loader; each rank of the loading stage, {self._of_stage}, "
                    "needs one"
                )
            return None, []
        loaded = self._loading.next()
        if loaded is None:
            return None, None
        self._loaded = [lengths for _, lengths in loaded]
        told = [word for lengths in self._loaded for word in (len(lengths), *lengths)]
        return [batch for batch, _ in loaded], told if self._rank in self._of_stage else []

    def _is_last(self, counts: list[int]) -> bool:
        return ENDED in counts

    def _layouts(self, words: list[list[int]], counts: list[int]) -> list[Layout]:
        told = {rank: _split(words[rank]) for rank in self._of_stage}
        expected = self._loading.microbatches
        for rank, of_rank in told.items():
            if len(of_rank) != expected:
                raise InvalidArgumentError(
                    f"{_NAME}: rank {rank} loads {len(of_rank)} micro-batches for an iteration, rank {self._rank} "
                    f"expects {expected}; microbatches= must be the same on all ranks"
                )
        if self._loaded is not None and self._loaded != told[self._place]:
            number = next(n for n, lengths in enumerate(self._loaded) if lengths != told[self._place][n])
            raise InvalidArgumentError(
                f"{_NAME}: rank {self._rank} loaded documents of {self._loaded[number]} rows for micro-batch {number}, "
                f"and rank {self._place} of the loading stage {told[self._place][number]}; they must be the same"
            )
        return [Layout.from_documents([told[rank][n] for rank in self._of_stage]) for n in range(expected)]


def _split(words: list[int]) -> list[list[int]]:
    """The lengths of each micro-batch from what a rank has told."""
    rest = iter(words)
    return [list(itertools.islice(rest, count)) for count in rest]
