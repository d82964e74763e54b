"""`Ahead`: what a loader yields with the plans for it, prepared one step ahead by a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distca.errors import DistcaError, InvalidArgumentError
from distca.planner.exchange import FAILED, STOPPED, Exchange, Steps, not_the_end

if TYPE_CHECKING:
    from typing_extensions import Self

Loaded = TypeVar("Loaded")
Planned = TypeVar("Planned")

_JOIN_SECONDS = 10.0


class Ahead(ABC, Generic[Loaded, Planned]):
    """Iterates over pairs of what was loaded and its plans. Each `iter()` begins a new pass over the loader.

    The thread of a pass prepares the next pair while the current one is used. `close`, or the end of a `with`, stops it
    and leaves the group over which lengths are exchanged. There is one pass at a time: after a new `iter()`, iterators
    of earlier ones raise an InvalidArgumentError.
    """

    def __init__(self, exchange: Exchange | None, make_plans: Callable[[Any], Planned]) -> None:
        """`make_plans` makes the plans of the layout, or layouts, of a step."""
        self._exchange, self._make_plans = exchange, make_plans
        self._pass: _Pass[Loaded, Planned] | None = None
        self._closed = False

    @abstractmethod
    def _steps(self) -> Steps[Any, Any]:
        """The steps of a new pass."""

    def __iter__(self) -> Iterator[tuple[Loaded, Planned]]:
        if self._closed:
            raise InvalidArgumentError(f"{type(self).__name__}: it was closed; make a new one")
        self._end_pass(_JOIN_SECONDS, replaced=True)
        self._pass = _Pass(self._steps(), self._make_plans)
        return _StepsOfPass(self, self._pass)

    def close(self) -> None:
        """Stops the thread and leaves the private group. It may be called more than once."""
        if self._closed:
            return
        self._closed = True
        over = self._end_pass(_JOIN_SECONDS)
        if self._exchange is not None and over:
            self._exchange.close()

    def _end_pass(self, seconds: float, *, replaced: bool = False) -> bool:
        ended, self._pass = self._pass, None
        if ended is None:
            return True
        ended.state.stop(replaced=replaced)
        over = ended.join(seconds)
        while replaced and not over and self._exchange is not None and self._exchange.is_waiting:
            over = ended.join(seconds)  # until another rank comes to the end of its pass, or the exchange times out
        if not over and not self._closed:
            raise DistcaError(
                f"{type(self).__name__}: the thread of the earlier pass did not end within {_JOIN_SECONDS:g} seconds: "
                "the loader is blocked"
            )
        return over

    def __enter__(self) -> Self:
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
            running.state.stop()


class _StepsOfPass(Iterator[tuple[Loaded, Planned]]):
    """What `iter()` returns. It keeps the `Ahead` alive, which may have no other reference in a ``for`` loop."""

    def __init__(self, owner: Ahead[Loaded, Planned], running: _Pass[Loaded, Planned]) -> None:
        self._owner, self._pass = owner, running

    def __next__(self) -> tuple[Loaded, Planned]:
        return self._pass.state.take()


class _Pass(Generic[Loaded, Planned]):
    """One pass over the loader: the thread, and the state in which it leaves what it has prepared.

    The thread holds that state but not the `Ahead` itself. Therefore dropping the `Ahead` and its iterators can stop
    it.
    """

    def __init__(self, steps: Steps[Any, Any], make_plans: Callable[[Any], Planned]) -> None:
        self.state = _PassState[Loaded, Planned]()
        self._thread = threading.Thread(
            target=_prepare, args=(self.state, steps, make_plans), name="distca-plan-ahead", daemon=True
        )
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Waits for the thread. Returns whether it is over."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)
        return not self._thread.is_alive()


class _PassState(Generic[Loaded, Planned]):
    """What thread and consumer share: at most one prepared step, and how the pass ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[tuple[Loaded, Planned]] = deque()
        self._stopped = False
        self._replaced = False  # by a new pass
        self._over = False
        self._ended = False  # the consumer knows that no step follows
        self._error: BaseException | None = None

    def take(self) -> tuple[Loaded, Planned]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over or self._stopped)
            if self._ready and not self._stopped:
                step = self._ready.popleft()
                self._changed.notify_all()
                return step
            if self._error is None and self._replaced and not self._ended:
                raise InvalidArgumentError(
                    "the pass of this iterator ended when a later iter() began another one; keep one iterator, or make "
                    "a PlanAhead for each"
                )
            self._ended = True
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration

    def put(self, step: tuple[Loaded, Planned]) -> bool:
        """Adds a step and waits until it was taken. Returns False if the consumer wants no more."""
        with self._changed:
            self._ready.append(step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._ready or self._stopped)
            return not self._stopped

    def stop(self, *, replaced: bool = False) -> None:
        with self._changed:
            self._stopped = True
            self._replaced = self._replaced or replaced
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._over, self._error = True, error
            self._changed.notify_all()


def _prepare(state: _PassState[Loaded, Planned], steps: Steps[Any, Any], make_plans: Callable[[Any], Planned]) -> None:
    code = STOPPED
    try:
        for loaded, layouts in steps:
            if not state.put((loaded, make_plans(layouts))):
                break
        state.finish(None)
    except BaseException as error:  # the next iteration raises it
        state.finish(not_the_end(error))
        code = FAILED
    with contextlib.suppress(DistcaError):  # a peer is gone as well, and has raised its own error
        steps.abort(code)
