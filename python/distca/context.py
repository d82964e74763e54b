"""`Context`: one rank's membership in an attention group."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from distca import _C
from distca.connect.row_exchange import GroupRows, RowExchange
from distca.errors import refusals_told
from distca.heads import LayerHeads, shapes_of
from distca.max_logits import MaxLogits
from distca.planner.cost import CostModel
from distca.planner.exchange import Exchange as LengthsExchange
from distca.planner.memory import SLOTS
from distca.recording import Recording
from distca.registry import Registered, closed_names, find_context, open_contexts
from distca.trace.trace import Trace, from_core

if TYPE_CHECKING:
    from distca.connect.exchange import Exchange
    from distca.connect.fault_watch import FaultWatch
    from distca.connect.place import Place
    from distca.planner.stats import PlanStats

_log = logging.getLogger("distca")
#: How far above its tolerance the imbalance of a plan is if the heap is called too small, as a fraction of the mean.
_CLEARLY = 0.1
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Context(Registered):
    """One rank's membership in an attention group, with its heap and step counter. `init` makes it.

    There is one of it: copies of what holds it, such as `copy.deepcopy` of a module, hold the same one. It cannot be
    pickled.

    Attributes:
        name: its name in the process's registry, which ``core_attention`` takes.
        rank, num_ranks: this rank's number, and the number of ranks in the group.
        global_ranks: for each rank its process's rank in ``torch.distributed``. Where they differ, messages name both.
        stages: for each stage of the pipeline its ranks, as `pipeline.PipelinePlans` takes them; one stage of all ranks
            if `init` got no ``pipeline_parallel``.
        transport: name of the transport in use.
        device: where its tensors are.
        attention: what computes attention, in words; on the CPU with the instruction set on which the ranks agreed.
        plan_independent: whether out, lse and dq of a row have the same bits whatever the plan and the number of ranks.
            On a GPU this holds for dq only in deterministic mode.
        slot_bytes: bytes of one slot's arena: the capacity that plans must keep to.
        heads: the head shape that it was made for: with tensor parallelism this process's part of the model's heads.
            Where layers differ, that with the most bytes a row.
        layer_heads: the heads of all layers, as `plans` takes them: `heads`, or a mapping from each window.
        cost: the default cost model of its plans.
        nsys: whether its operators are NVTX ranges.
        timeout: seconds after which a silent peer is an error; None if whoever made the context did not say.
    """

    def __init__(
        self,
        core: _C.Context,
        heads: LayerHeads,
        cost: CostModel,
        exchange: Exchange | None = None,
        *,
        place: Place | None = None,
        watch: FaultWatch | None = None,
        nsys: bool = False,
        emulation: ModuleType | None = None,
        timeout: float | None = None,
        rows: Callable[[Sequence[int]], RowExchange] | None = None,
    ) -> None:
        self._core: _C.Context | None = core
        self._exchange, self._watch = exchange, watch
        self._emulation: Any = emulation  # what has made the core, if not _C: it knows what a link has carried
        self.name: str = core.name
        self.rank = core.rank
        self.num_ranks = core.num_ranks
        ranks = list(range(self.num_ranks))
        self.global_ranks, self.stages = (ranks, [ranks]) if place is None else (place.global_ranks, place.stages)
        self.transport = core.transport
        self.device = core.device
        shapes = shapes_of("init", heads)
        named = [core.attention(*shape.numbers) for shape in shapes]
        self.attention, self.plan_independent = named[0][0], all(independent for _, independent in named)
        self.slot_bytes = core.slot_bytes
        self._last_step = 0
        self.heads, self.layer_heads = shapes[0], dict(heads) if isinstance(heads, Mapping) else heads
        self.cost = cost
        self.nsys = nsys
        self.timeout = timeout
        self._lengths_exchange: LengthsExchange | None = None
        self._rows = rows
        self._row_exchanges: dict[tuple[int, ...], RowExchange] = {}
        self._finder: MaxLogits | None = None  # what `max_logits` has made, while it is in use
        self._is_recording = False
        self._short_heap_is_noted = threading.Lock()  # never released; plans may be made in several threads
        self._callers: dict[int, tuple[int | str | None, int | None]] | None = None  # layer and half of traced steps
        self.backward_steps: weakref.WeakSet[Any] = weakref.WeakSet()  # steps in parts whose backward is under way
        open_contexts[self.name] = self
        _log.info(
            "context %r: rank %d of %d over %s on %s, a heap of %s bytes, attention by %s",
            self.name,
            self.rank,
            self.num_ranks,
            self.transport,
            self.device,
            f"{SLOTS * self.slot_bytes:,}",
            self.attention,
        )

    @property
    def short_heap_is_noted(self) -> bool:
        """Whether `note_short_heap` has warned."""
        return self._short_heap_is_noted.locked()

    def note_short_heap(self, stats: PlanStats, tolerance: float) -> None:
        """Warns, once in the life of the context, that its heap keeps a plan far from its tolerance."""
        if stats.imbalance_after <= 1.0 + tolerance + _CLEARLY or not self._short_heap_is_noted.acquire(blocking=False):
            return
        _log.warning(
            "context %r: the heap is too small to balance a batch (%s): its imbalance is %.2f, and %.2f was asked for; "
            "raise max_tokens of distca.init, or give it heap_bytes of at least %s. Further batches are not reported",
            self.name,
            stats.binding,
            stats.imbalance_after,
            1.0 + tolerance,
            f"{SLOTS * stats.wanted_slot_bytes:,}",
        )

    @property
    def step(self) -> int:
        """Steps taken so far. The forward and the backward of a call are one step each."""
        return self._last_step if self._core is None else self._core.step

    def abandon(self, step: int, why: str = "") -> None:
        """Says that this rank will not finish a step that it has dispatched. `why` ends the error message.

        If the step is not finished, this is a fault: this context is poisoned and the peers are told, so that they do
        not wait.
        """
        if self._core is not None:
            self._core.abandon(step, why)

    def lengths_exchange(self, group: dist.ProcessGroup | None = None) -> LengthsExchange | None:
        """The private group over which the ranks tell each other the lengths of their documents, for integrations that
        plan in a call of the model. The first call makes it, on all ranks. None if this rank is alone.

        Args:
            group: the ranks of the context, in its order; by default all.
        """
        if self._lengths_exchange is None and self.num_ranks > 1:
            self._lengths_exchange = LengthsExchange(group, self.timeout)
        return self._lengths_exchange

    def row_exchange(self, ranks: Sequence[int] | None = None) -> RowExchange:
        """What hands rows of any tensor from rank to rank, for integrations. The first call makes it, on those ranks.

        Args:
            ranks: the ranks of the context that take part, this one among them; by default all.

        Raises:
            PeerDiedError, PeerTimeoutError: a rank has ended, or does not come.
        """
        members = tuple(range(self.num_ranks) if ranks is None else ranks)
        if members not in self._row_exchanges:
            if self._rows is not None:
                made = self._rows(members)
            else:
                of_processes = [self.global_ranks[rank] for rank in members]
                made = GroupRows(of_processes, torch.device(self.device).type, self.timeout)
            self._row_exchanges[members] = made
        return self._row_exchanges[members]

    def check(self) -> None:
        """Raises the fault that this rank has met, if any, and waits for nothing.

        This is for steps on a GPU, which are queued: this call, or the next call of the context, reports their faults.
        While another thread is in a step, that thread raises the fault, and this call does nothing.

        Raises:
            PeerDiedError, PeerLeftError, PeerTimeoutError, PlanMismatchError: the fault.
            ContextPoisonedError: a fault that was raised before.
        """
        if self._core is not None:
            self._core.check()

    def record(self, *, headroom: float = 2.0, rounds: int = 2) -> Recording:
        """Records the steps inside ``with context.record() as recording``, to repeat them with new plans.

        It works for contexts whose steps are queued: those on CUDA with ``attention="own"``, and those on
        threads that stand for a GPU's streams (``distca.testing.loopback(streams=True)``). Everything else
        that PyTorch does inside is done at once, and only once. Therefore a call that casts rows under autocast is
        refused, and so is backward that computes the gradient of sinks. If a CUDA graph is captured meanwhile, the
        recorded steps and all else become a part of that graph, and neither is refused::

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), context.record() as recording:
                loss = step_of_training()
            recording.replan(plans)  # before each launch
            graph.replay()

        Keep recording and context as long as the graph. Ranks of one process that share a GPU must meet at a barrier
        after they have recorded, because making the recording's memory may wait for the whole device.

        Args:
            headroom: the room in the tables of each operation, as a multiple (1 to 1000) of what the plans inside need.
                If it is above 1, each table has room for at least 256 elements.
            rounds: the least number of rounds, 1 to 1000, in which results may come home to this rank.

        Raises:
            InvalidArgumentError: on entering, if the transport's steps are not queued, another recording is open, or a
                step is under way. On leaving, if a step was dispatched and not collected, or no step was recorded.
        """
        return Recording(self, headroom, rounds)

    def max_logits(self) -> MaxLogits:
        """Finds the largest logits of the layers that run inside ``with context.max_logits() as found``.

        It is for models that cannot pass ``max_logits=True`` to `core_attention`, as those of transformers. All ranks
        of the context enter and leave it between the same steps. Where activation checkpointing runs layers again,
        backward must be inside too::

            with context.max_logits() as found:
                loss = model(**batch).loss
                loss.backward()
            found[3]  # of layer 3 in this rank's rows: [H], float32

        Calls in compiled code do not take part, nor do replays of a recording.

        Raises:
            InvalidArgumentError: on entering, if another one is in use or a recording is open. On leaving, if a forward
                step inside did not take part because it was compiled.
        """
        return MaxLogits(self)

    def start_trace(self) -> None:
        """Starts a trace of this rank's steps. `take_trace` returns the trace, `stop_trace` ends it.

        Times are the host's clock. For steps on a GPU they say when the step was queued.
        """
        if self._core is not None:
            self._callers = {}
            self._core.set_trace(True)
            self.take_trace()

    def stop_trace(self) -> None:
        """Ends what `start_trace` began. What was not taken is dropped."""
        if self._core is not None:
            self._core.set_trace(False)
            self.take_trace()
            self._callers = None

    def note_caller(self, step: int, layer: int | str | None, half: int | None = None) -> None:
        """Tells the trace, if there is one, which layer and which half of ping-pong a step of attention belongs to."""
        if self._callers is not None:
            self._callers[step] = layer, half

    def take_trace(self) -> Trace:
        """What was recorded since `start_trace` or the last call. No step may be running on another thread."""
        if self._core is None:
            return Trace(self.rank, [], [])
        callers = self._callers or {}
        if self._callers is not None:
            self._callers = {}
        transfers = [] if self._emulation is None else self._emulation.take_transfers(self._core)
        return from_core(self.rank, self._core.take_trace(), transfers, self._core.take_copies(), callers)

    def close(self) -> None:
        """Leaves the group and frees the heap. May be called again."""
        if open_contexts.get(self.name) is self:
            del open_contexts[self.name]
            closed_names.add(self.name)
            if self._watch is not None:
                self._watch.close()
            self._last_step = self.step
            self._core = None
            # The last reference, unless a step is under way. It goes without the GIL: the end of a context waits for
            # what is queued on a device, and in `loopback` that may wait for a rank of another thread.
            _C.remove_context(self.name)
            if self._exchange is not None:
                self._exchange.close()
            if self._lengths_exchange is not None:
                self._lengths_exchange.close()
            for exchange in self._row_exchanges.values():
                exchange.close()
            _log.info("context %r: closed after %d steps", self.name, self._last_step)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __copy__(self) -> Context:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"context {self.name!r} cannot be pickled, because it is this process's membership in a group: leave it "
            "out of what is pickled, and call distca.init in each process"
        )

    def __repr__(self) -> str:
        own = self.global_ranks[self.rank]
        where = "" if self.global_ranks == list(range(self.num_ranks)) else f" (global rank {own})"
        return f"Context({self.name!r}, rank {self.rank} of {self.num_ranks}{where}, {self.transport})"


def check() -> None:
    """Raises the first fault that a context of this process has met, and waits for nothing. See `Context.check`.

    Steps on a GPU are queued. After ``torch.cuda.synchronize()`` this call tells whether their results may be used.
    """
    for context in list(open_contexts.values()):
        context.check()


def collective(function: _Function) -> _Function:
    """Decorates a collective function with the keyword `context`: peers are told of the calls that it refuses."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        context = kwargs.get("context", "default")
        with refusals_told(find_context(context)):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@atexit.register
def _close_all() -> None:
    """Closes all contexts when the process exits normally. Without this it would look dead to its peers."""
    for context in list(open_contexts.values()):
        try:
            context.close()
        except Exception:  # the others are closed all the same
            _log.exception("context %r could not be closed", context.name)
