"""A plan of one layout, seen from one rank. It needs no process group, no context and no GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from operator import index
from typing import Any

import torch

from distca import _C
from distca.arguments import is_whole
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.layout import Chunk, Layout, Window
from distca.planner.memory import MemoryReport, report
from distca.planner.scores import MASKS
from distca.planner.stats import ArenaBytes, PlanStats, Task, Transfer

_MESSAGES = ("forward_in", "forward_out", "backward_in", "backward_out")
#: The tensors by their numbers in the core. The last two are fp32 sums over several servers.
_TENSORS = ("q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv", "dk", "dv")

#: What keeps the load above the tolerance, by its number in the core.
_BINDINGS = (None, "single rows", "capacity", "balance off", "given tasks")
_CAPACITY = _BINDINGS.index("capacity")


def _text(digest: int) -> str:
    return f"0x{digest:016x}"


def _tensor_of(words: bytearray) -> torch.Tensor:
    with torch.inference_mode(False):  # else no backward could keep it
        return torch.frombuffer(words, dtype=torch.int64)


class Plan:
    """One layout's tasks, transfers and arenas, seen from one rank. `plan` makes it, the same on every rank.

    A plan is a value. It can be copied, compared by its digest, and pickled. Therefore a ``DataLoader``'s workers may
    make plans, and a checkpoint may hold them. A pickle has this rank's slice, which is checked when it is read, and
    the arguments of the plan. An unpickled plan is made again, and must have the same digest, when ``tasks``,
    ``stats``, ``transfers`` or ``for_rank`` are asked for.

    Attributes:
        layout, heads: what it was made for.
        whole: if `plans` made it for a `Chunk`, the layout whose documents are cut in `layout`; otherwise None.
        mask, window: those of this rank's first document; all documents have the same, if `plan` got no ``scores``.
        rank: the rank it is seen from.
        num_rows: rows of that rank's token tensor.
        has_documents: whether any of them is of a document. Else mask and window are those of document 0.
        has_bidirectional: whether some rows of a document see those after them (`Layout.with_bidirectional`).
        has_branches: whether documents begin with rows of others (`Layout`).
        tensor: that rank's slice, for the operators: int64 on the CPU, its length a power of two.
        retain_bytes: bytes that each rank may retain of a step, as `plan` was told.
        retains: whether any rank may retain something.
        retained_bytes: bytes that this rank retains of a step.
        in_parts: whether `core_attention` takes its steps in parts, as ping-pong does.
        half: the half of ping-pong that this copy was made for: 0 or 1; None otherwise.
    """

    # Also in pickles of earlier versions, which lack them.
    has_documents = True
    has_bidirectional = False
    has_branches = False
    whole: Layout | None = None

    def __init__(
        self,
        layout: Layout,
        heads: Heads,
        arguments: Mapping[str, Any],
        rank: int,
        *,
        tasks: list[tuple[int, ...]] | None = None,
        like: tuple[Plan, list[int]] | None = None,
    ) -> None:
        self._arguments = arguments  # the attributes of a `_C.PlanOptions`
        self._tasks = tasks
        self._like = like  # the plan whose schedule this one has, and the ranks in place of its servers
        self.layout = layout
        self.heads = heads
        self.retain_bytes: list[int] = list(arguments["retain_bytes"])
        self.retains = any(self.retain_bytes)
        self._look_from(rank, self._core.slice(rank))

    def _look_from(self, rank: int, words: bytearray) -> None:
        # These are plain attributes, not properties: torch.compile reads them without breaking the graph.
        self.rank = rank
        self._words = words
        self.tensor = _tensor_of(words)
        self.num_rows = self.layout.num_rows(rank)
        number, numbers = 0, self._arguments["scores_of_document"]
        first = next((document for document, _, _ in self.layout.segments(rank) if document >= 0), None)
        if numbers:
            number = numbers[first or 0]
        self.has_documents = first is not None
        self.has_bidirectional = self.layout._core.has_bidirectional
        self.has_branches = self.layout._core.has_shared
        mask, window, *_ = self._arguments["scores"][number]
        self.mask: str = MASKS[mask]
        self.window: int | None = window or None
        self.retained_bytes: int = self.stats.retained_bytes[rank] if self.retains else 0
        self.in_parts = False
        self.half: int | None = None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which contributions of several servers to a key's gradients travel."""
        return self.heads.dtype if self._arguments["reduce_dtype"] else torch.float32

    @functools.cached_property
    def _core(self) -> _C.Plan:
        """The core's plan of all ranks. An unpickled plan makes it again when it is first needed."""
        options = _C.PlanOptions()
        heads = self.heads
        options.heads = heads.numbers
        for name, value in self._arguments.items():
            setattr(options, name, value.core if name == "cost" else value)
        if self._like is not None:
            like, servers = self._like
            core = like._core.scheduled_alike(self.layout._core, options, servers)
        else:
            core = _C.Plan(self.layout._core, options, self._tasks)
        self._digest: int = vars(self).get("_digest", core.digest)  # a pickled plan had one
        if self._digest != core.digest:
            raise InvalidArgumentError(
                f"plan: it was pickled with digest {self.digest}, and its arguments give {_text(core.digest)} here: "
                "another version of distca made it; plan again"
            )
        return core

    def __getstate__(self) -> dict[str, Any]:
        made_again = ("_core", "tensor", "tasks", "stats")
        return {name: value for name, value in vars(self).items() if name not in made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _C.validate_plan(memoryview(state["_words"]).cast("q"))
        vars(self).update(state, tensor=_tensor_of(state["_words"]))

    def __copy__(self) -> Plan:
        plan = Plan.__new__(Plan)
        vars(plan).update(vars(self))
        return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return copy.copy(self)  # a plan is never changed

    def for_parts(self, half: int | None = None) -> Plan:
        """A copy whose steps `core_attention` takes in parts. `half` tells traces which half of ping-pong it is of."""
        plan = copy.copy(self)
        plan.in_parts, plan.half = True, half
        return plan

    def same_window(self, window: int | None, mask: str = "causal") -> bool:
        """Whether this plan has that mask and lets every row see the keys that a layer of that window lets it see."""
        if self.mask != mask or self.window == window:
            return self.mask == mask
        longest = max(self.layout.document_lengths, default=0)
        return min(self.window or longest, longest) == min(window or longest, longest)

    def memory(self, *, layers: int = 1) -> MemoryReport:
        """The bytes that this plan takes on every rank. Printed, it is a table. See `distca.memory_report`."""
        return report([self.stats], layers=layers)

    def scheduled_alike(self, layout: Layout, servers: list[int], label: str) -> Plan:
        """A plan of another layout with the schedule of this one. Nothing is balanced anew.

        Args:
            layout: a layout with the same documents, in the same order. They may be on other ranks.
            servers: for each rank the rank that computes what that one computes here.
            label: as in `plan`.

        Raises:
            CapacityError: as in `plan`.
        """
        return Plan(layout, self.heads, {**self._arguments, "label": label}, self.rank, like=(self, servers))

    def for_rank(self, rank: int) -> Plan:
        """The same plan seen from another rank."""
        if not is_whole(rank, 0, self.layout.num_ranks - 1):
            raise InvalidArgumentError(f"plan: rank = {rank!r}; 0 to {self.layout.num_ranks - 1} are allowed")
        words = self._core.slice(index(rank))
        plan = copy.copy(self)
        plan._look_from(index(rank), words)
        return plan

    @property
    def digest(self) -> str:
        """The digest that ranks compare at each step, to see that they have the same plan."""
        return _text(self._digest)

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """All tasks, in the order of (server, document, kv_head_begin, q_begin)."""
        return [Task(*task) for task in self._core.tasks()]

    @property
    def transfers(self) -> list[Transfer]:
        """All rows that travel between ranks. Rows that stay on their rank are not listed."""
        return [
            Transfer(_MESSAGES[t[0]], t[1], t[2], t[3], t[4], t[5], t[6], t[7], _TENSORS[t[8]], t[9], t[10])
            for t in self._core.transfers()
        ]

    @functools.cached_property
    def stats(self) -> PlanStats:
        """Loads, bytes and arenas of all ranks."""
        raw = self._core.stats()
        raw["arena_bytes"] = {
            phase: [ArenaBytes(*arena) for arena in arenas] for phase, arenas in raw["arena_bytes"].items()
        }
        number, rank = raw.pop("binding")
        raw["binding"] = f"capacity of rank {rank}" if number == _CAPACITY else _BINDINGS[number]
        speeds = self._arguments["speeds"] or [1] * self.layout.num_ranks
        return PlanStats(**raw, speeds=speeds, _servers=self._arguments["servers"], _core=self._core)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"Plan({self.layout.num_ranks} ranks, {len(self.tasks)} tasks, imbalance {stats.imbalance_before:.3f} -> "
            f"{stats.imbalance_after:.3f}, {sum(stats.bytes.values()):,} bytes a layer, digest {self.digest})"
        )


def is_bound_by_capacity(plan: Plan) -> bool:
    """Whether ``plan.stats.binding`` is the capacity of a rank. It takes less time than all statistics."""
    return bool(plan._core.stats()["binding"][0] == _CAPACITY)


class Plans(Mapping[Window, Plan]):
    """Plans of one layout by window, for a model whose layers differ in their window. None stands for no window.

    `plans` makes it. ``plans[window]`` is the plan of exactly that window; `for_window` also finds one that
    has the same effect. The plan of a `Chunk` is that of ``layout.chunked(...)``.

    Args:
        by_window: the plans. One of a `Chunk` knows its documents if `plans` made it; if all are of chunks, one must.
        exact: whether `for_window` takes the plan of exactly the window that it is asked for and no other, because
            layers of windows with the same effect differ in their bidirectional rows.
    """

    def __init__(self, by_window: Mapping[Window, Plan], *, exact: bool = False) -> None:
        if not by_window:
            raise InvalidArgumentError("plans: no windows are given; None stands for a layer without one")
        self._by_window = dict(by_window)
        self._exact = exact
        whole = [plan.whole if isinstance(window, Chunk) else plan.layout for window, plan in self.items()]
        layouts = [layout for layout in whole if layout is not None]
        found = max(layouts, key=lambda layout: layout._core.has_bidirectional, default=None)  # some may lack such rows
        if found is None:
            raise InvalidArgumentError(
                "plans: all are of chunks, and do not tell the documents: make them with "
                "distca.plans(layout, heads, windows=[...])"
            )
        self._layout = found

    def __getitem__(self, window: Window) -> Plan:
        if window not in self._by_window:
            raise KeyError(self._no_plan(window))
        return self._by_window[window]

    def __iter__(self) -> Iterator[Window]:
        return iter(self._by_window)

    def __len__(self) -> int:
        return len(self._by_window)

    @property
    def layout(self) -> Layout:
        """The layout that all of them are for."""
        return self._layout

    @property
    def rank(self) -> int:
        """The rank that all of them are seen from."""
        return self._first.rank

    @property
    def _first(self) -> Plan:
        return next(iter(self._by_window.values()))

    def for_rank(self, rank: int) -> Plans:
        """The same plans seen from another rank."""
        return Plans({window: plan.for_rank(rank) for window, plan in self.items()}, exact=self._exact)

    def for_parts(self, half: int | None = None) -> Plans:
        """A copy whose steps `core_attention` takes in parts. `half` tells traces which half of ping-pong it is of."""
        return Plans({window: plan.for_parts(half) for window, plan in self.items()}, exact=self._exact)

    def for_window(self, window: Window) -> Plan:
        """The plan for layers of that window. All windows, and chunks, at least as long as every document have the same
        effect. Where plans differ in their heads, or some of them alone have bidirectional rows
        (`plans(bidirectional_windows=)`), only the plan of exactly that window is meant.

        Raises:
            InvalidArgumentError: no plan here has that effect. The message names the windows that there are.
        """
        if window in self._by_window:
            return self._by_window[window]
        if self._exact or len({plan.heads for plan in self.values()}) > 1:
            raise InvalidArgumentError(self._no_plan(window))
        longest = max(self._layout.document_lengths, default=0)
        if isinstance(window, Chunk) and window.rows >= longest and (whole := self.for_window(None)).mask == "causal":
            return whole
        for of, plan in self.items():
            if isinstance(of, Chunk):
                if of.rows >= longest and not isinstance(window, Chunk) and (window or longest) >= longest:
                    return plan
            elif not isinstance(window, Chunk) and plan.same_window(window, plan.mask):
                return plan
        raise InvalidArgumentError(self._no_plan(window))

    def _no_plan(self, window: Window) -> str:
        differ = ", whose heads differ" if len({plan.heads for plan in self.values()}) > 1 else ""
        differ += ", and bidirectional_windows holds for these alone" if self._exact else ""
        return (
            f"plans: no plan for a window of {window}; there are plans for {', '.join(map(str, self))}{differ}: make "
            "them with distca.plans(layout, heads, windows=[...]) for the windows of all layers"
        )

    def __repr__(self) -> str:
        return f"Plans({self._by_window!r})"
