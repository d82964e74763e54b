"""`PlanAhead`: batches with their plans, prepared one step ahead by a thread of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast, overload

import torch.distributed as dist

from distca.errors import InvalidArgumentError
from distca.heads import Heads, LayerHeads
from distca.planner.ahead import Ahead
from distca.planner.exchange import ENDED, Exchange, GatheredSteps, Steps, not_the_end
from distca.planner.layout import Layout, Window
from distca.planner.plan import Plan, Plans
from distca.planner.planning import plan, plans
from distca.planner.telling import Bidirectional, Branches, Continues, Lengths, Segments, Telling, telling

Batch = TypeVar("Batch")
Planned = TypeVar("Planned", bound=Plan | Plans)


class PlanAhead(Ahead[Batch | None, Planned], Generic[Batch, Planned]):
    """Iterates over `loader` and yields `(batch, plan)`; a thread prepares the next pair while the current one is used.

    One of three arguments says how the ranks learn each other's documents:

    - `layout(batch) -> Layout`: every rank already knows the layout of all ranks (a global deterministic sampler).
      There is no traffic.
    - `lengths(batch) -> list[int]`: the lengths of the documents in this rank's batch, in the order of its rows. The
      ranks of `group` (default: all) exchange them, and every rank plans the same layout. They use a gloo group of
      their own, which the calling thread makes here. Therefore construction, iteration and closing are collective.
      Documents are whole. Only the first one may continue the last one of the rank before, if `continues(batch)` says
      so; each rank then tells the length of its part.
    - `segments(batch) -> list[(document, begin, end)]`: which rows of which documents are in this rank's batch, in the
      order of its rows, for documents that are cut in any other way, as by `Layout.head_tail`. Ranks that hold parts of
      the same document of a step call it by the same number, and no other document of the step has it. Numbers may have
      gaps. Document -1 is padding. The ranks exchange their segments like lengths.

    With `lengths` and `segments`, `bidirectional(batch) -> list[(document, begin, end)]` says which rows see those
    after them, too (`Layout.with_bidirectional`): a prefix, or the tokens of an image. Rows count from the first one of
    the document. With `lengths` a rank numbers its documents from 0; of one that continues it tells no such rows. With
    `segments` it calls them as they do; of a document on several ranks any of these tells them, or several do.

    With `segments`, `branches(batch) -> {document: other}` says which documents begin with all rows of which other
    ones, or with which rows of several (`Layout`, argument `branches`). Of a branch at least one rank tells it; all
    that do tell the same.

    `transform` is what every rank makes of a step's layout before it plans, the same on all, such as
    ``lambda layout: layout.block_diffusion(32)``, which doubles rows, padding and idle ones among them.

    With `lengths` and `segments` loaders may end at different steps: a rank whose loader has ended gets `(None, plan)`,
    in which it has no rows, until all loaders have ended. `idle_rows` gives it rows of padding instead, for models that
    cannot take an empty tensor.

    `rank` is the rank whose slice the plans carry (default: that of the `context`, or this process's rank in `group` if
    none is given). `plan_options` go to `distca.plan`; the `context` that runs the plans is one of them. `windows` are
    the windows of a model whose layers differ in their sliding window; each step then has `distca.Plans` instead of one
    `distca.Plan`, and `heads` may be a mapping, as in `distca.plans`. The thread calls loader and callbacks, one call
    at a time.

    The next iteration raises an exception of the loader, of the callbacks or of planning. With `lengths` or `segments`,
    the other ranks then raise a PeerLeftError that names the rank. To stop the thread, use the PlanAhead as a context
    manager or call `close()`. After a plain `break` the thread stops when the object and its iterator are dropped. Each
    `iter()` begins a new pass over the loader and ends the one before, whose iterator then raises an
    InvalidArgumentError.

    The thread reads the loader one batch ahead. A loader's ``state_dict()`` that is taken during a step counts a batch
    that was not trained. For checkpoints let the loader yield its state beside each batch, ``yield batch,
    loader.state_dict()``, and save the one that came with the last trained batch.

    Raises:
        InvalidArgumentError: not exactly one of `layout`, `lengths` and `segments` is given, `continues` without
            `lengths`, `bidirectional` with `layout`, `branches` without `segments`, or `idle_rows` is negative.
    """

    @overload
    def __init__(
        self: PlanAhead[Batch, Plan],
        loader: Iterable[Batch],
        *,
        heads: Heads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Lengths | None = None,
        continues: Continues = None,
        segments: Segments | None = None,
        bidirectional: Bidirectional = None,
        branches: Branches = None,
        transform: Callable[[Layout], Layout] | None = None,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        idle_rows: int = 0,
        windows: None = None,
        **plan_options: Any,
    ) -> None: ...

    @overload
    def __init__(
        self: PlanAhead[Batch, Plans],
        loader: Iterable[Batch],
        *,
        heads: LayerHeads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Lengths | None = None,
        continues: Continues = None,
        segments: Segments | None = None,
        bidirectional: Bidirectional = None,
        branches: Branches = None,
        transform: Callable[[Layout], Layout] | None = None,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        idle_rows: int = 0,
        windows: Iterable[Window],
        **plan_options: Any,
    ) -> None: ...

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        heads: LayerHeads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Lengths | None = None,
        continues: Continues = None,
        segments: Segments | None = None,
        bidirectional: Bidirectional = None,
        branches: Branches = None,
        transform: Callable[[Layout], Layout] | None = None,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        idle_rows: int = 0,
        windows: Iterable[Window] | None = None,
        **plan_options: Any,
    ) -> None:
        if sum(given is not None for given in (layout, lengths, segments)) != 1:
            raise InvalidArgumentError("PlanAhead: give exactly one of layout=, lengths= and segments=")
        if bidirectional is not None and layout is not None:
            raise InvalidArgumentError("PlanAhead: bidirectional= needs lengths= or segments=; a layout says it itself")
        if branches is not None and segments is None:
            raise InvalidArgumentError("PlanAhead: branches= needs segments=, which say where a branch's rows begin")
        if continues is not None and lengths is None:
            raise InvalidArgumentError("PlanAhead: continues= needs lengths=; the others say it by themselves")
        if idle_rows < 0:
            raise InvalidArgumentError(f"PlanAhead: idle_rows is {idle_rows}, must be at least 0")
        if rank is None and plan_options.get("context") is None and dist.is_initialized():
            rank = dist.get_rank(group)
        self._loader, self._layout, self._idle_rows = loader, layout, idle_rows
        self._telling = (
            None if layout is not None else telling("PlanAhead", lengths, continues, segments, bidirectional, branches)
        )
        make: Callable[[Layout], Plan | Plans] = (
            functools.partial(plan, heads=cast(Heads, heads), rank=rank, **plan_options)
            if windows is None
            else functools.partial(plans, heads=heads, rank=rank, windows=list(windows), **plan_options)
        )
        super().__init__(
            None if self._telling is None else Exchange(group),
            cast(Callable[[Layout], Planned], make if transform is None else _transformed(transform, make)),
        )

    def _steps(self) -> Steps[Batch | None, Layout]:
        if self._layout is not None:
            return _KnownLayouts(self._loader, self._layout)
        assert self._telling is not None and self._exchange is not None
        return _GatheredLayouts(self._exchange, self._loader, self._telling, self._idle_rows)


def _transformed(
    transform: Callable[[Layout], Layout], make: Callable[[Layout], Plan | Plans]
) -> Callable[[Layout], Plan | Plans]:
    if not callable(transform):
        raise InvalidArgumentError(f"PlanAhead: transform is {transform!r}; a function of a layout is expected")

    def made(layout: Layout) -> Plan | Plans:
        result = transform(layout)
        if not isinstance(result, Layout):
            raise InvalidArgumentError(f"PlanAhead: transform returned a {type(result).__name__}; a Layout is expected")
        return make(result)

    return made


class _KnownLayouts(Steps[Batch, Layout]):
    def __init__(self, loader: Iterable[Batch], layout: Callable[[Batch], Layout]) -> None:
        self._batches: Iterator[Batch] | None = None
        self._loader, self._layout = loader, layout

    def __next__(self) -> tuple[Batch, Layout]:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        try:
            return batch, self._layout(batch)
        except StopIteration as error:
            raise not_the_end(error) from error


class _GatheredLayouts(GatheredSteps[Batch | None, Layout]):
    """Steps until all loaders have ended. A rank whose loader has ended has no batch."""

    def __init__(
        self,
        exchange: Exchange,
        loader: Iterable[Batch],
        telling: Telling,
        idle_rows: int,
    ) -> None:
        super().__init__(exchange, "PlanAhead")
        self._loader, self._telling, self._idle_rows = loader, telling, idle_rows
        self._batches: Iterator[Batch] | None = None
        self._loader_ended = False

    def _load(self) -> tuple[Batch | None, list[int] | None]:
        if self._batches is None:
            self._batches = iter(self._loader)
        if not self._loader_ended:
            for batch in self._batches:
                if batch is None:
                    raise InvalidArgumentError(
                        "PlanAhead: the loader yielded None, which stands for a loader that has ended"
                    )
                return batch, self._telling.words(batch)
            self._loader_ended = True
        return None, None

    def _is_last(self, counts: list[int]) -> bool:
        return max(counts) == ENDED

    def _layouts(self, words: list[list[int]], counts: list[int]) -> Layout:
        idle_rows = [self._idle_rows if count == ENDED else 0 for count in counts]
        return self._telling.layout(words, idle_rows)
