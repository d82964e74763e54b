"""`PlanAhead`: batches with their plans, prepared one step ahead by a thread of this process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, overload

import torch
import torch.distributed as dist

from distca.errors import DistcaError, InvalidArgumentError, PeerDiedError, PeerLeftError
from distca.heads import Heads
from distca.planner.layout import Layout
from distca.planner.plan import Plan, Plans
from distca.planner.planning import plan, plans

Batch = TypeVar("Batch")
Planned = TypeVar("Planned", bound=Plan | Plans)

# Codes that a rank sends in place of its number of documents.
_ENDED = -1
_FAILED = -2
_STOPPED = -3

_JOIN_SECONDS = 10.0


class PlanAhead(Generic[Batch, Planned]):
    """Iterates over `loader` and yields `(batch, plan)`; a thread prepares the next pair while the current one is used.

    One of two arguments says how the ranks learn each other's lengths:

    - `layout(batch) -> Layout`: every rank already knows the layout of all ranks (a global deterministic sampler).
      There is no traffic.
    - `lengths(batch) -> list[int]`: the lengths of the whole documents in this rank's batch, in the order of its rows.
      The ranks of `group` (default: all) exchange them, and every rank plans the same data-parallel layout. They use a
      gloo group of their own, which the calling thread makes here. Therefore construction, iteration and closing are
      collective. Loaders may end at different steps: a rank whose loader has ended gets `(None, plan)`, in which it has
      no rows, until all loaders have ended. `idle_rows` gives it rows of padding instead, for models that cannot take
      an empty tensor.

    `rank` is the rank whose slice the plans carry (default: this process's rank in `group`). `plan_options` go to
    `distca.plan`; the `context` that runs the plans is one of them. `windows` are the windows of a model whose layers
    differ in their sliding window; each step then has `distca.Plans` instead of one `distca.Plan`. The thread calls
    `loader`, `layout` and `lengths`, one call at a time.

    The next iteration raises an exception of the loader, of the callbacks or of planning. With `lengths`, the other
    ranks then raise a PeerLeftError that names the rank. To stop the thread, use the PlanAhead as a context manager or
    call `close()`. After a plain `break` the thread stops when the object is dropped. Each `iter()` begins a new pass
    over the loader.

    Raises:
        InvalidArgumentError: not exactly one of `layout` and `lengths` is given, or `idle_rows` is negative.
    """

    @overload
    def __init__(
        self: PlanAhead[Batch, Plan],
        loader: Iterable[Batch],
        *,
        heads: Heads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Callable[[Batch], Sequence[int]] | None = None,
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
        heads: Heads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Callable[[Batch], Sequence[int]] | None = None,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        idle_rows: int = 0,
        windows: Iterable[int | None],
        **plan_options: Any,
    ) -> None: ...

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        heads: Heads,
        layout: Callable[[Batch], Layout] | None = None,
        lengths: Callable[[Batch], Sequence[int]] | None = None,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        idle_rows: int = 0,
        windows: Iterable[int | None] | None = None,
        **plan_options: Any,
    ) -> None:
        if (layout is None) == (lengths is None):
            raise InvalidArgumentError("PlanAhead: give exactly one of layout= and lengths=")
        if idle_rows < 0:
            raise InvalidArgumentError(f"PlanAhead: idle_rows is {idle_rows}, must be at least 0")
        if rank is None and dist.is_initialized():
            rank = dist.get_rank(group)
        self._loader = loader
        self._pass: _Pass[Batch, Planned] | None = None
        self._closed = False
        self._exchange: _Exchange | None = None
        if lengths is not None:
            self._exchange = _Exchange(group, idle_rows)
        self._layout, self._lengths = layout, lengths
        make: Callable[[Layout], Plan | Plans] = (
            functools.partial(plan, heads=heads, rank=rank, **plan_options)
            if windows is None
            else functools.partial(plans, heads=heads, rank=rank, windows=list(windows), **plan_options)
        )
        self._make_plan = cast(Callable[[Layout], Planned], make)

    def __iter__(self) -> Iterator[tuple[Batch | None, Planned]]:
        if self._closed:
            raise InvalidArgumentError("PlanAhead: it was closed; make a new one")
        self._end_pass(_JOIN_SECONDS)
        steps: _Steps[Batch]
        if self._layout is not None:
            steps = _KnownLayouts(self._loader, self._layout)
        else:
            assert self._lengths is not None and self._exchange is not None
            steps = self._exchange.steps(self._loader, self._lengths)
        self._pass = _Pass(steps, self._make_plan)
        return self._pass

    def close(self) -> None:
        """Stops the thread and leaves the private group. It may be called more than once."""
        if self._closed:
            return
        self._closed = True
        over = self._end_pass(_JOIN_SECONDS)
        if self._exchange is not None and over:
            self._exchange.close()

    def _end_pass(self, seconds: float) -> bool:
        ended, self._pass = self._pass, None
        if ended is None:
            return True
        ended.stop()
        over = ended.join(seconds)
        if not over and not self._closed:
            raise DistcaError(
                f"PlanAhead: the thread of the earlier pass did not end within {_JOIN_SECONDS:g} seconds: "
                "the loader is blocked, or another rank has not stopped iterating"
            )
        return over

    def __enter__(self) -> PlanAhead[Batch, Planned]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # other ranks may wait for this one, and must see the error now
            self._closed = True
            self._end_pass(0.0)
        self.close()

    def __del__(self) -> None:
        if (running := getattr(self, "_pass", None)) is not None:
            running.stop()


# A step as the thread sees it: the batch (None if this rank's loader has ended) and the layout of all ranks.
_Step = tuple[Batch | None, Layout]


class _Steps(Iterator[_Step[Batch]]):
    """A source of steps. If the pass ends before its last step, `abort` is told why."""

    def abort(self, code: int) -> None:
        """Says that this rank takes no further step: it has failed (_FAILED) or was stopped (_STOPPED)."""


class _KnownLayouts(_Steps[Batch]):
    def __init__(self, loader: Iterable[Batch], layout: Callable[[Batch], Layout]) -> None:
        self._batches: Iterator[Batch] | None = None
        self._loader, self._layout = loader, layout

    def __next__(self) -> _Step[Batch]:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        return batch, self._layout(batch)


class _Exchange:
    """The private gloo group over which the ranks exchange their lengths."""

    def __init__(self, group: dist.ProcessGroup | None, idle_rows: int) -> None:
        self.group: dist.ProcessGroup | None = None
        self.num_ranks, self.idle_rows = 1, idle_rows
        self._of_all_ranks = group is None or group == dist.group.WORLD
        if not dist.is_initialized():
            return
        if self._of_all_ranks:
            self.group = dist.new_group(backend="gloo")
        else:
            members = dist.get_process_group_ranks(group)
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.num_ranks = dist.get_world_size(self.group)

    def steps(self, loader: Iterable[Batch], lengths: Callable[[Batch], Sequence[int]]) -> _Steps[Batch]:
        return _GatheredLayouts(self, loader, lengths)

    def close(self) -> None:
        # A group of some ranks stays until torch.distributed ends. torch names it after its members; a second group of
        # that name would read the addresses of the first.
        if self.group is not None and self._of_all_ranks:
            dist.destroy_process_group(self.group)
        self.group = None

    def counts(self, mine: int) -> list[int]:
        """What each rank says about the step: its number of documents, or one of the codes."""
        return [int(count) for (count,) in self._gather(torch.tensor([mine], dtype=torch.int64))]

    def lengths(self, mine: list[int], counts: list[int]) -> list[list[int]]:
        longest = max(max(counts), 0)
        if longest == 0:
            return [[] for _ in counts]
        padded = torch.zeros(longest, dtype=torch.int64)
        padded[: len(mine)] = torch.tensor(mine, dtype=torch.int64)
        return [row[: max(count, 0)] for row, count in zip(self._gather(padded), counts, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[list[int]]:
        if self.group is None:
            return [mine.tolist()]
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        return [theirs.tolist() for theirs in everyone]


class _GatheredLayouts(_Steps[Batch]):
    """Steps with gathered layouts. All ranks make the same exchanges until all loaders end or one rank gives up."""

    def __init__(self, exchange: _Exchange, loader: Iterable[Batch], lengths: Callable[[Batch], Sequence[int]]) -> None:
        self._exchange, self._loader, self._lengths = exchange, loader, lengths
        self._batches: Iterator[Batch] | None = None
        self._loader_ended = False
        self._over = False  # the ranks agreed that no further exchange follows
        self._step = 0

    def __next__(self) -> _Step[Batch]:
        batch, mine = self._next_batch()
        counts = self._counts(len(mine) if batch is not None else _ENDED)
        self._raise_for_peers(counts)
        if max(counts) == _ENDED:
            self._over = True
            raise StopIteration
        lengths = self._exchange.lengths(mine, counts)
        self._step += 1
        return batch, self._layout(lengths, counts)

    def abort(self, code: int) -> None:
        if not self._over:
            self._over = True
            self._counts(code)

    def _next_batch(self) -> tuple[Batch | None, list[int]]:
        if self._batches is None:
            self._batches = iter(self._loader)
        if not self._loader_ended:
            for batch in self._batches:
                if batch is None:
                    raise InvalidArgumentError(
                        "PlanAhead: the loader yielded None, which stands for a loader that has ended"
                    )
                mine = [int(length) for length in self._lengths(batch)]
                if (wrong := next((length for length in mine if length < 1), None)) is not None:
                    raise InvalidArgumentError(f"PlanAhead: a document has length {wrong}, must be at least 1")
                return batch, mine
            self._loader_ended = True
        return None, []

    def _counts(self, mine: int) -> list[int]:
        try:
            return self._exchange.counts(mine)
        except RuntimeError as error:
            self._over = True
            raise PeerDiedError(
                f"PlanAhead: the ranks could not exchange lengths of step {self._step}: {error}"
            ) from error

    def _raise_for_peers(self, counts: list[int]) -> None:
        for rank, count in enumerate(counts):
            if count in (_FAILED, _STOPPED):
                self._over = True
                what = "failed; its own error says why" if count == _FAILED else "stopped iterating"
                raise PeerLeftError(f"PlanAhead: rank {rank} of {len(counts)} {what} (before step {self._step})")

    def _layout(self, lengths: list[list[int]], counts: list[int]) -> Layout:
        idle = self._exchange.idle_rows
        if idle == 0 or _ENDED not in counts:
            return Layout.from_documents(lengths)
        ranks: list[list[tuple[int, int, int]]] = []
        document = 0
        for rank_lengths, count in zip(lengths, counts, strict=True):
            ranks.append([(document + i, 0, length) for i, length in enumerate(rank_lengths)])
            document += len(rank_lengths)
            if count == _ENDED:
                ranks[-1].append((-1, 0, idle))
        return Layout(ranks)


class _Pass(Iterator[tuple[Batch | None, Planned]]):
    """One pass over the loader: the thread, and the state in which it leaves what it has prepared.

    The thread holds that state but not the `PlanAhead` itself. Therefore dropping the `PlanAhead` can stop it.
    """

    def __init__(self, steps: _Steps[Batch], make_plan: Callable[[Layout], Planned]) -> None:
        self._state = _PassState[Batch, Planned]()
        self._thread = threading.Thread(
            target=_prepare, args=(self._state, steps, make_plan), name="distca-plan-ahead", daemon=True
        )
        self._thread.start()

    def __next__(self) -> tuple[Batch | None, Planned]:
        return self._state.take()

    def stop(self) -> None:
        self._state.stop()

    def join(self, seconds: float) -> bool:
        """Waits for the thread. Returns whether it is over."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def __del__(self) -> None:
        if (state := getattr(self, "_state", None)) is not None:
            state.stop()


class _PassState(Generic[Batch, Planned]):
    """What thread and consumer share: at most one prepared step, and how the pass ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[tuple[Batch | None, Planned]] = deque()
        self._stopped = False
        self._over = False
        self._error: BaseException | None = None

    def take(self) -> tuple[Batch | None, Planned]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over or self._stopped)
            if self._ready and not self._stopped:
                step = self._ready.popleft()
                self._changed.notify_all()
                return step
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration

    def put(self, step: tuple[Batch | None, Planned]) -> bool:
        """Adds a step and waits until it was taken. Returns False if the consumer wants no more."""
        with self._changed:
            self._ready.append(step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._ready or self._stopped)
            return not self._stopped

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._over, self._error = True, error
            self._changed.notify_all()


def _prepare(state: _PassState[Batch, Planned], steps: _Steps[Batch], make_plan: Callable[[Layout], Planned]) -> None:
    code = _STOPPED
    try:
        for batch, layout in steps:
            if not state.put((batch, make_plan(layout))):
                break
        state.finish(None)
    except BaseException as error:  # the next iteration raises it
        state.finish(error)
        code = _FAILED
    with contextlib.suppress(DistcaError):  # a peer is gone as well, and has raised its own error
        steps.abort(code)
