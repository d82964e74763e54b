"""`PipelinePlansAhead`: iterations of a pipeline with their plans, prepared one iteration ahead."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from distca.arguments import is_whole
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.pipeline.plans import PipelinePlans, checked_stages
from distca.planner.ahead import Ahead
from distca.planner.exchange import ENDED, Exchange, GatheredSteps
from distca.planner.layout import Layout
from distca.planner.telling import Bidirectional, Branches, Continues, Lengths, Segments, Telling, telling

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
    `break` the thread stops when the object and its iterator are dropped. Each `iter()` begins a new pass over the
    loader and ends the one before. The thread reads the loader one iteration ahead; for checkpoints in the middle of an
    epoch let it yield its state beside each batch, as in `PlanAhead`.

    Args:
        loader: the micro-batches of this rank, one after the other, or None for a rank that loads nothing. A rank of
            another stage may load as well, for example the labels; its batches must have the documents of the rank in
            its place in the loading stage.
        heads: head shape and dtype of the layers.
        stages: for each stage its ranks, as in `PipelinePlans`.
        lengths: the lengths of the documents in a batch, in the order of its rows. The thread calls it and the loader,
            one call at a time.
        segments: in place of `lengths`, which rows of which documents are in a batch, as in `PlanAhead`.
        bidirectional: which rows of a batch's documents see those after them, too, as in `PlanAhead`.
        branches: with `segments`, which documents begin with rows of which others, as in `PlanAhead`.
        continues: whether the first document of a batch continues the last one of the rank before in the stage. Each
            rank then tells the length of its part. By default documents are whole.
        microbatches: micro-batches of an iteration.
        loading_stage: number of the stage whose ranks tell the lengths.
        group: the process group of all ranks of all stages; by default all processes.
        tellers: for each rank of the stages the rank of `group` that tells its lengths. The group may then have more
            ranks than the stages: with tensor parallelism each tensor group has one that tells.
        rank: which rank of the stages this process is; by default its rank in the group.
        options: the other arguments of `PipelinePlans`, such as ``layers``, ``chunks`` and ``context``.

    Yields:
        The batches of an iteration, as many as there are micro-batches, or None without a loader; and its plans.

    Raises:
        InvalidArgumentError: `stages` is wrong as in `PipelinePlans`, another number is out of range, or the group has
            another number of ranks than the stages and there are no `tellers`; or not exactly one of `lengths` and
            `segments` is given.
    """

    def __init__(
        self,
        loader: Iterable[Batch] | None,
        *,
        heads: Heads,
        stages: Sequence[Sequence[int]],
        microbatches: int,
        lengths: Lengths | None = None,
        continues: Continues = None,
        segments: Segments | None = None,
        bidirectional: Bidirectional = None,
        branches: Branches = None,
        loading_stage: int = 0,
        group: dist.ProcessGroup | None = None,
        tellers: Sequence[int] | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        stages = checked_stages(_NAME, stages)
        num_ranks = sum(map(len, stages))
        if not is_whole(microbatches, 1):
            raise InvalidArgumentError(f"{_NAME}: microbatches = {microbatches!r}; a positive integer is expected")
        if not is_whole(loading_stage, 0, len(stages) - 1):
            raise InvalidArgumentError(
                f"{_NAME}: loading_stage = {loading_stage!r}; 0 to {len(stages) - 1} are allowed"
            )
        mine, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        rank, tellers = mine if rank is None else rank, list(range(size) if tellers is None else tellers)
        if num_ranks != len(tellers):
            raise InvalidArgumentError(
                f"{_NAME}: the stages have {num_ranks} ranks, and {len(tellers)} ranks of the group tell for them"
            )
        if not is_whole(rank, 0, num_ranks - 1) or not all(is_whole(teller, 0, size - 1) for teller in tellers):
            raise InvalidArgumentError(
                f"{_NAME}: rank = {rank!r}, tellers = {tellers}; 0 to {num_ranks - 1} and 0 to {size - 1} are allowed"
            )
        load = _Loading(loader, telling(_NAME, lengths, continues, segments, bidirectional, branches), microbatches)
        self._load, self._tells = load, [tellers[each] for each in stages[loading_stage]]
        self._mine, self._place = mine, next(ranks.index(rank) for ranks in stages if rank in ranks)
        super().__init__(
            Exchange(group), functools.partial(PipelinePlans, heads=heads, stages=stages, rank=rank, **options)
        )

    def _steps(self) -> _Iterations[Batch]:
        assert self._exchange is not None
        return _Iterations(self._exchange, self._load.restarted(), self._tells, self._mine, self._place)


@dataclass
class _Loading(Generic[Batch]):
    """The micro-batches of a rank, an iteration at a time."""

    loader: Iterable[Batch] | None
    telling: Telling
    microbatches: int
    _batches: Iterator[Batch] | None = None

    def restarted(self) -> _Loading[Batch]:
        """The same from the loader's beginning."""
        return replace(self, _batches=None)

    def next(self) -> list[tuple[Batch, list[int]]] | None:
        """The batches of an iteration, each with what is told of it; None if the loader has too few left."""
        if self._batches is None:
            assert self.loader is not None
            self._batches = iter(self.loader)
        batches = list(itertools.islice(self._batches, self.microbatches))
        if len(batches) < self.microbatches:
            return None
        return [(batch, self.telling.words(batch)) for batch in batches]


class _Iterations(GatheredSteps[list[Batch] | None, list[Layout]]):
    """Iterations until one loader has ended.

    The ranks that tell something tell, for each micro-batch, the number of its words and then its words. The others
    tell nothing.
    """

    def __init__(self, exchange: Exchange, loading: _Loading[Batch], tellers: list[int], rank: int, place: int) -> None:
        """`rank` is this process in the exchange; `place` says which of `tellers` tells of the rows that it has."""
        super().__init__(exchange, _NAME)
        self._loading, self._tellers, self._rank, self._place = loading, tellers, rank, place
        self._loaded: list[list[int]] | None = None

    def _load(self) -> tuple[list[Batch] | None, list[int] | None]:
        if self._loading.loader is None:
            if self._rank in self._tellers:
                raise InvalidArgumentError(
                    f"{_NAME}: rank {self._rank} has no loader; each of the ranks {self._tellers}, of the loading "
                    "stage, needs one"
                )
            return None, []
        loaded = self._loading.next()
        if loaded is None:
            return None, None
        self._loaded = [words for _, words in loaded]
        told = [word for words in self._loaded for word in (len(words), *words)]
        return [batch for batch, _ in loaded], told if self._rank in self._tellers else []

    def _is_last(self, counts: list[int]) -> bool:
        return ENDED in counts

    def _layouts(self, words: list[list[int]], counts: list[int]) -> list[Layout]:
        told = [_split(words[rank]) for rank in self._tellers]
        expected = self._loading.microbatches
        for rank, of_rank in zip(self._tellers, told, strict=True):
            if len(of_rank) != expected:
                raise InvalidArgumentError(
                    f"{_NAME}: rank {rank} loads {len(of_rank)} micro-batches for an iteration, rank {self._rank} "
                    f"expects {expected}; microbatches= must be the same on all ranks"
                )
        if self._loaded is not None and self._loaded != told[self._place]:
            theirs = told[self._place]
            number = next(n for n, words in enumerate(self._loaded) if words != theirs[n])
            say = self._loading.telling.say
            raise InvalidArgumentError(
                f"{_NAME}: rank {self._rank} loaded {say(self._loaded[number])} for micro-batch {number}, and rank "
                f"{self._tellers[self._place]} of the loading stage {say(theirs[number])}; they must be the same"
            )
        whole = [0] * len(told)
        return [self._loading.telling.layout([of_rank[n] for of_rank in told], whole) for n in range(expected)]


def _split(words: list[int]) -> list[list[int]]:
    """The words of each micro-batch from what a rank has told."""
    rest = iter(words)
    return [list(itertools.islice(rest, count)) for count in rest]
