"""Plans. Usable alone: no process group, no context, no GPU."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distca import _C
from distca.arguments import check_type, is_number, is_whole, listed
from distca.cost import CostModel
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.layout import Layout

if TYPE_CHECKING:
    from distca.context import Context
    from distca.memory import MemoryReport

#: That a rank may keep: no limit in practice.
_MOST_BYTES = 2**46

_MASK_NUMBERS = {"causal": 0, "full": 1}
_MESSAGES = ("forward_in", "forward_out", "backward_in", "backward_out")
#: By number in the core; the last two are sums of several servers in fp32.
_TENSORS = ("q", "k", "v", "out", "lse", "dout", "delta", "dq", "dk", "dv", "dk", "dv")


class Task(NamedTuple):
    """Query rows ``[q_begin, q_end)`` of a document and the keys they see, computed by ``server`` in one go.

    For key/value heads ``[kv_head_begin, kv_head_end)`` and the query heads that share them; ``home`` is the rank that
    holds the rows.
    """

    document: int
    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    kv_head_begin: int
    kv_head_end: int
    home: int
    server: int


class Transfer(NamedTuple):
    """Rows ``[begin, end)`` of a document that one message takes from rank ``source`` to rank ``target``.

    ``message`` is a key of ``PlanStats.bytes``. ``tensor`` is q, k, v, out, lse, dout, delta, dq, dk or dv; of it,
    key/value heads ``[kv_head_begin, kv_head_end)`` or the query heads that share them travel. dk and dv travel in fp32
    where several servers contribute to the rows.
    """

    message: str
    source: int
    target: int
    document: int
    begin: int
    end: int
    kv_head_begin: int
    kv_head_end: int
    tensor: str
    bytes: int


class ArenaBytes(NamedTuple):
    """Bytes of one rank's arena in one phase."""

    server_in: int
    home_in: int
    scratch: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


@dataclasses.dataclass(frozen=True)
class PlanStats:
    """What a plan does, over all ranks. Loads are in units of the cost model, times query heads.

    Attributes:
        load_before: load of each rank with every row computed at home.
        load: load of each rank as planned.
        lower_bound: no plan has a smaller largest load.
        num_servers: ranks that compute tasks.
        bytes: bytes between ranks for each message: forward_in, forward_out, backward_in, backward_out.
        bytes_between_nodes: the part of them that goes from one node to another.
        arena_bytes: for each phase, forward and backward, the arena of every rank.
        retained_bytes: what every rank keeps, as a server, from a step's forward to its backward.
        saved_bytes: what backward_in would have besides if nothing were retained.
        binding: what keeps the largest load from the tolerance: None (it is within), ``"single rows"`` (none can move
            with gain), ``"capacity of rank 3"`` (whose arena would need most), ``"balance off"`` or ``"given tasks"``.
            ``imbalance_after`` tells how near it came.
        wanted_slot_bytes: ``slot_bytes`` of the plan that would be made if there were no capacity to keep to.
        plan_ms: time that planning took, in milliseconds.
    """

    load_before: list[int]
    load: list[int]
    lower_bound: int
    num_servers: int
    bytes: dict[str, int]
    bytes_between_nodes: dict[str, int]
    arena_bytes: dict[str, list[ArenaBytes]]
    retained_bytes: list[int]
    saved_bytes: int
    binding: str | None
    wanted_slot_bytes: int
    plan_ms: float
    _made: _Made = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def _byte_lower_bounds(self) -> tuple[int, int]:
        return self._made.core.byte_lower_bounds()

    @property
    def bytes_lower_bound(self) -> int:
        """No plan within the tolerance moves fewer bytes, of all messages or of those of the objective.

        Found when asked for; 0, which says nothing, for cost models with rates.
        """
        return self._byte_lower_bounds[0]

    @property
    def bytes_between_nodes_lower_bound(self) -> int:
        """The same of bytes from one node to another."""
        return self._byte_lower_bounds[1]

    @property
    def imbalance_before(self) -> float:
        """Largest load over mean load with every row computed at home; 1 where there is no load."""
        return _imbalance(self.load_before, len(self.load_before))

    @property
    def imbalance_after(self) -> float:
        """Largest load over mean load of the servers as planned; 1 where there is no load."""
        return _imbalance(self.load, self.num_servers)

    @property
    def gap(self) -> float:
        """How far the largest load is above the lower bound, as a fraction of it."""
        return max(self.load) / self.lower_bound - 1.0 if self.lower_bound else 0.0

    @property
    def slot_bytes(self) -> int:
        """The largest arena of any rank and phase: what a slot of the context's heap must hold."""
        return max(arena.total for arenas in self.arena_bytes.values() for arena in arenas)


def _imbalance(loads: list[int], servers: int) -> float:
    total = sum(loads)
    return max(loads) * servers / total if total else 1.0


class _Made:
    """The core's plan of all ranks, and how it was made: so it is made again where it was pickled."""

    def __init__(self, layout: Layout, heads: Heads, arguments: Mapping[str, Any]) -> None:
        self.layout, self.heads, self._arguments = layout, heads, arguments
        self._core: _C.Plan | None = self._plan()
        self.digest: int = self._core.digest

    def _plan(self) -> _C.Plan:
        cost: CostModel = self._arguments["cost"]
        return _C.Plan(
            layout=self.layout._core,
            q_heads=self.heads.q,
            kv_heads=self.heads.kv,
            dim=self.heads.dim,
            v_dim=self.heads.value_dim,
            dtype=self.heads.dtype_number,
            **{**self._arguments, "cost": cost.core},
        )

    @property
    def core(self) -> _C.Plan:
        if self._core is None:
            core = self._plan()
            if core.digest != self.digest:
                raise InvalidArgumentError(
                    f"plan: it was pickled with digest {_text(self.digest)}, and its arguments give "
                    f"{_text(core.digest)} here: another version of distca made it; plan again"
                )
            self._core = core
        return self._core

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_core": None}


def _text(digest: int) -> str:
    return f"0x{digest:016x}"


class Plan:
    """One layout's tasks, transfers and arenas, seen from one rank. Made by :func:`plan`; the same on every rank.

    A value: it can be copied, compared by its digest, and pickled, so that a ``DataLoader``'s workers may make plans
    and a checkpoint may have them. What is pickled is this rank's slice, checked when it is read, and how the plan was
    made: what else is asked of it (``tasks``, ``stats``, ``for_rank``) is then planned again, to the same digest.

    Attributes:
        layout, heads, mask, window: what it was made for.
        rank: the rank it is seen from.
        num_rows: rows of that rank's token tensor.
        tensor: that rank's slice for the operators: int64, CPU, length a power of two.
        retain_bytes: what each rank may keep of a step, as `plan` was told.
        retains: whether any rank may keep something.
        retained_bytes: what this rank keeps of a step.
        in_parts: whether `core_attention` takes its steps in parts, as ping-pong does.
        half: of ping-pong, for which this copy was made: 0 or 1; None otherwise.
    """

    def __init__(self, made: _Made, rank: int, mask: str, window: int | None, retain_bytes: Sequence[int]) -> None:
        self._made = made
        self._words = made.core.slice(rank)
        self.layout = made.layout
        self.heads = made.heads
        self.rank = rank
        self.mask = mask
        self.window = window
        self.retain_bytes = list(retain_bytes)
        # Plain attributes, not properties: torch.compile reads them without breaking the graph.
        self.tensor = torch.frombuffer(self._words, dtype=torch.int64)
        self.num_rows = self.layout.num_rows(rank)
        self.retains = any(self.retain_bytes)
        self.retained_bytes: int = self.stats.retained_bytes[rank] if self.retains else 0
        self.in_parts = False
        self.half: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tensor", "tasks", "stats")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _C.validate_plan(memoryview(state["_words"]).cast("q"))
        vars(self).update(state, tensor=torch.frombuffer(state["_words"], dtype=torch.int64))

    def __copy__(self) -> Plan:
        plan = Plan.__new__(Plan)
        vars(plan).update(vars(self))
        return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return copy.copy(self)  # nothing in it changes

    def for_parts(self, half: int | None = None) -> Plan:
        """The same plan, whose steps `core_attention` takes in parts; of a half of ping-pong, for traces."""
        plan = copy.copy(self)
        plan.in_parts, plan.half = True, half
        return plan

    def same_window(self, window: int | None) -> bool:
        """Whether this causal plan is right for a layer of that window: no document shows the difference."""
        if self.window == window:
            return self.mask == "causal"
        longest = max(self.layout.document_lengths, default=0)
        return self.mask == "causal" and min(self.window or longest, longest) == min(window or longest, longest)

    def memory(self, *, layers: int = 1) -> MemoryReport:
        """The bytes that this plan takes on every rank; printed, a table. See :func:`distca.memory_report`."""
        from distca.memory import memory_report  # which knows contexts, that know plans

        return memory_report(self, layers=layers)

    def for_rank(self, rank: int) -> Plan:
        """The same plan seen from another rank."""
        return Plan(self._made, rank, self.mask, self.window, self.retain_bytes)

    @property
    def digest(self) -> str:
        """What ranks compare to see that they have the same plan."""
        return _text(self._made.digest)

    @functools.cached_property
    def tasks(self) -> list[Task]:
        """All tasks, by (server, document, kv_head_begin, q_begin)."""
        return [Task(*task) for task in self._made.core.tasks()]

    @property
    def transfers(self) -> list[Transfer]:
        """All rows that travel between ranks; what stays on its rank is not listed."""
        return [
            Transfer(_MESSAGES[t[0]], t[1], t[2], t[3], t[4], t[5], t[6], t[7], _TENSORS[t[8]], t[9])
            for t in self._made.core.transfers()
        ]

    @functools.cached_property
    def stats(self) -> PlanStats:
        """Loads, bytes and arenas."""
        raw = self._made.core.stats()
        raw["arena_bytes"] = {
            phase: [ArenaBytes(*arena) for arena in arenas] for phase, arenas in raw["arena_bytes"].items()
        }
        number, rank = raw.pop("binding")
        raw["binding"] = (None, "single rows", f"capacity of rank {rank}", "balance off", "given tasks")[number]
        return PlanStats(**raw, _made=self._made)

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"Plan({self.layout.num_ranks} ranks, {len(self.tasks)} tasks, imbalance {stats.imbalance_before:.3f} -> "
            f"{stats.imbalance_after:.3f}, {sum(stats.bytes.values()):,} bytes a layer, digest {self.digest})"
        )


def plan(
    layout: Layout,
    heads: Heads,
    *,
    context: Context | str | None = None,
    rank: int | None = None,
    mask: str = "causal",
    window: int | None = None,
    servers: Sequence[int] | None = None,
    speeds: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 0.05,
    balance: bool = True,
    split_heads: bool = True,
    min_rows: int = 128,
    objective: str = "all",
    overlap: bool = False,
    retain_bytes: int | Sequence[int] = 0,
    capacity: int | None = None,
    cost: CostModel | None = None,
    tasks: Sequence[tuple[int, int, int, int, int, int]] | None = None,
) -> Plan:
    """Cuts core attention of a layout into tasks and gives every rank the same load (paper, section 4.2).

    A pure function of its arguments, the same on every rank to the last bit, so nobody needs to send it. No context is
    read unless it is given.

    Args:
        layout: rows of every rank.
        heads: head shape and dtype of the layers that will use the plan.
        context: the context that is to run the plan, or its name, of as many ranks as the layout: `rank`, `capacity`
            and `cost` are its own unless they are given too.
        rank: the rank whose slice ``Plan.tensor`` is; by default that of `context`, or 0 without one.
        mask: ``"causal"`` or ``"full"`` (every row of a document sees all of it).
        window: with the causal mask, how many keys a row sees: its own and the ``window - 1`` before it.
        servers: the ranks that compute tasks; by default all (in-place servers).
        speeds: how fast each rank is, integers from 1 to 2**20 in units of your choice; a rank's load is compared with
            its share of their sum. By default all are equal.
        ranks_per_node: so many neighbouring ranks are a node, and bytes between nodes are avoided first; by default all
            ranks are one.
        tolerance: how far the *largest* load may be above the mean, 0 to 1.
        balance: False computes every row at home; remote keys of split documents are still fetched.
        split_heads: whether ranges of a document's key/value heads may go to different servers, which often moves fewer
            bytes than rows do.
        min_rows: no smaller piece of a document is cut off as long as the tolerance can be met without.
        objective: whose bytes are kept few: ``"all"`` four messages, or those of the ``"forward"`` pass.
        overlap: gradients come home from all servers at once where the capacity allows, so that they travel while ranks
            compute: for ping-pong. By default they come in rounds, as many messages at a time as fit into memory that
            the neediest rank's arena takes anyway, and only the first round travels unawaited.
        retain_bytes: how many bytes of keys and values each rank, as a server, may keep from a step's forward to its
            backward, so that they are not sent again: one number for all ranks, or one for each. Every call of
            `core_attention` keeps up to as much until its backward has run, so times the layers. Kept are the documents
            that save most bytes; results have the same bits. By default nothing is.
        capacity: bytes of one slot's arena, which no plan passes: it comes first, then the tolerance. By default that
            of `context`, or unlimited without one.
        cost: what is balanced; by default the cost model of `context`, or visible pairs without one.
        tasks: a schedule of your own in place of ours: for each task ``(document, q_begin, q_end, kv_head_begin,
            kv_head_end, server)``, in any order. ``balance``, ``tolerance`` and ``min_rows`` then have no effect.

    Raises:
        InvalidArgumentError: for arguments out of range, a context that is not open or has other ranks, and unless
            ``tasks`` compute every row and head exactly once.
        CapacityError: where not even rows computed at home fit, or given tasks do not; says the bytes needed.
    """
    check_type("plan", "layout", layout, Layout, "distca.Layout.from_documents([[100, 20], [80]])")
    check_type("plan", "heads", heads, Heads, "distca.Heads(q=8, kv=2, dim=64)")
    here = None if context is None else _context_of(layout, context)
    if rank is None:
        rank = 0 if here is None else here.rank
    if not is_whole(rank, 0, layout.num_ranks - 1):
        raise InvalidArgumentError(f"plan: rank = {rank!r}; 0 to {layout.num_ranks - 1} are allowed")
    if not isinstance(mask, str) or mask not in _MASK_NUMBERS:
        raise InvalidArgumentError(f"plan: mask = {mask!r}; {', '.join(map(repr, _MASK_NUMBERS))} are allowed")
    if servers is not None:
        servers = listed("plan", "servers", servers, "a list of ranks, or None for all,")
        if not servers:
            raise InvalidArgumentError("plan: servers is empty; None stands for all ranks")
        if not all(is_whole(server, 0, layout.num_ranks - 1) for server in servers):
            raise InvalidArgumentError(f"plan: servers = {servers}; ranks from 0 to {layout.num_ranks - 1} are allowed")
    if speeds is not None:
        speeds = listed("plan", "speeds", speeds, "one integer for each rank, or None for the same of all,")
        if not all(is_whole(speed, 1, 2**20) for speed in speeds):
            raise InvalidArgumentError(f"plan: speeds = {speeds}; integers from 1 to {2**20} are allowed")
    if ranks_per_node is not None and not is_whole(ranks_per_node, 1):
        raise InvalidArgumentError(f"plan: ranks_per_node = {ranks_per_node!r}; None or a positive number is allowed")
    if window is not None and not is_whole(window, 1):
        raise InvalidArgumentError(f"plan: window = {window!r}; None or a positive number of keys is allowed")
    if objective not in ("all", "forward"):
        raise InvalidArgumentError(f"plan: objective = {objective!r}; 'all' and 'forward' are allowed")
    if not is_number(tolerance, 0.0, 1.0):
        raise InvalidArgumentError(f"plan: tolerance = {tolerance!r}; 0 to 1 is allowed")
    if not is_whole(min_rows, 1):
        raise InvalidArgumentError(f"plan: min_rows = {min_rows!r}; at least 1 is allowed")
    if tasks is not None:
        tasks = listed("plan", "tasks", tasks, "a list of tasks, or None for ours,")
        for task in tasks:
            numbers = listed("plan", "a task", task, "(document, q_begin, q_end, kv_head_begin, kv_head_end, server)")
            if len(numbers) != 6 or not all(is_whole(number, -_MOST_BYTES) for number in numbers):
                raise InvalidArgumentError(
                    f"plan: a task is {task!r}; six integers (document, q_begin, q_end, kv_head_begin, kv_head_end, "
                    "server) are expected"
                )
    retain = _retain_bytes(retain_bytes, layout.num_ranks)
    if capacity is None:
        capacity = 2**62 if here is None else here.slot_bytes
    if not is_whole(capacity, 1):
        raise InvalidArgumentError(f"plan: capacity = {capacity!r} bytes; it must be positive")
    if cost is None:
        cost = CostModel() if here is None else here.cost
    check_type("plan", "cost", cost, CostModel, 'distca.CostModel.load("pairs")')
    arguments = {
        "cost": cost,
        "tolerance_ppm": round(tolerance * 1e6),
        "min_rows": min_rows,
        "balance": bool(balance),
        "capacity": capacity,
        "mask_kind": _MASK_NUMBERS[mask],
        "window": window or 0,
        "servers": [] if servers is None else sorted(set(map(index, servers))),
        "speeds": [] if speeds is None else list(map(index, speeds)),
        "ranks_per_node": ranks_per_node or 0,
        "forward_only": objective == "forward",
        "overlap": bool(overlap),
        "retain_bytes": retain,
        "split_heads": bool(split_heads),
        "tasks": None if tasks is None else [tuple(map(index, task)) for task in tasks],
    }
    return Plan(_Made(layout, heads, arguments), index(rank), mask, window, retain)


def _context_of(layout: Layout, context: Context | str) -> Context:
    """The open context that is to run plans of that layout."""
    from distca.context import find_context  # which knows nothing of plans

    here = find_context(context)
    if here is None:
        raise InvalidArgumentError(f"plan: there is no context {context!r}; distca.init makes one")
    if here.num_ranks != layout.num_ranks:
        raise InvalidArgumentError(
            f"plan: the layout is of {layout.num_ranks} ranks, context {here.name!r} of {here.num_ranks}; give a "
            "layout of its ranks, or no context"
        )
    return here


def _retain_bytes(asked: int | Sequence[int], num_ranks: int) -> list[int]:
    """For each rank."""
    try:
        of_ranks = [index(n) for n in asked] if isinstance(asked, Sequence) else [index(asked)] * num_ranks
    except TypeError:
        of_ranks = [-1]
    if len(of_ranks) != num_ranks or not all(0 <= n <= _MOST_BYTES for n in of_ranks):
        raise InvalidArgumentError(
            f"plan: retain_bytes = {asked!r}; a number of bytes from 0 to 2**46 is allowed, or one for each of "
            f"{num_ranks} ranks"
        )
    return of_ranks


class Plans(Mapping[int | None, Plan]):
    """Plans of one layout for a model whose layers differ in their window, by window; None is no window.

    Made by :func:`plans`. ``plans[window]`` is the plan of exactly that window, :meth:`for_window` also takes one that
    does the same.
    """

    def __init__(self, by_window: Mapping[int | None, Plan]) -> None:
        if not by_window:
            raise InvalidArgumentError("plans: no windows are given; None stands for a layer without one")
        self._by_window = dict(by_window)

    def __getitem__(self, window: int | None) -> Plan:
        return self._by_window[window]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._by_window)

    def __len__(self) -> int:
        return len(self._by_window)

    @property
    def layout(self) -> Layout:
        """The layout that all of them are for."""
        return self._first.layout

    @property
    def rank(self) -> int:
        """The rank that all of them are seen from."""
        return self._first.rank

    @property
    def _first(self) -> Plan:
        return next(iter(self._by_window.values()))

    def for_rank(self, rank: int) -> Plans:
        """The same plans seen from another rank."""
        return Plans({window: plan.for_rank(rank) for window, plan in self.items()})

    def for_parts(self, half: int | None = None) -> Plans:
        """The same plans, whose steps `core_attention` takes in parts; of a half of ping-pong, for traces."""
        return Plans({window: plan.for_parts(half) for window, plan in self.items()})

    def for_window(self, window: int | None) -> Plan:
        """The plan for layers of that window. Windows at least as long as every document are all the same.

        Raises:
            InvalidArgumentError: where no plan here does that; names the windows there are.
        """
        if window in self._by_window:
            return self._by_window[window]
        for plan in self.values():
            if plan.same_window(window):
                return plan
        raise InvalidArgumentError(
            f"plans: no plan for a window of {window}; there are plans for {', '.join(map(str, self))}: make them with "
            f"distca.plans(layout, heads, windows=[...])"
        )


def plans(layout: Layout, heads: Heads, *, windows: Iterable[int | None], **options: Any) -> Plans:
    """One plan for each window of a model whose layers differ in it (Gemma, gpt-oss); ``options`` as for :func:`plan`.

    Args:
        layout, heads: as for :func:`plan`.
        windows: the layers' windows; None for layers that see all of their document.
    """
    return Plans({window: plan(layout, heads, window=window, **options) for window in dict.fromkeys(windows)})
