"""What a plan consists of, and its effects: tasks, transfers, arenas, and statistics over all ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from distca import _C


class Task(NamedTuple):
    """A CA-task: query rows ``[q_begin, q_end)`` of a document, with the keys they see, computed by ``server`` at once.

    It covers key/value heads ``[kv_head_begin, kv_head_end)`` and the query heads that share them. ``home`` is the rank
    that holds the rows. The keys are rows ``[kv_begin, kv_end)`` of the document. ``round`` is the round of rows from
    other ranks after which it is computed; -1 if it needs none.
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
    round: int


class Transfer(NamedTuple):
    """Rows ``[begin, end)`` of a document that one message takes from rank ``source`` to rank ``target``.

    ``message`` is a key of ``PlanStats.bytes``. ``tensor`` is q, k, v, out, lse, dout, delta, dq, dk or dv. Of it
    travel the key/value heads ``[kv_head_begin, kv_head_end)``, or the query heads that share them. dk and dv travel in
    the plan's ``reduce_dtype`` if several servers contribute to the rows, or in fp32 where documents share them and
    that is not more bytes (`distca.plan`). ``round`` is the round in which rows go to their server, or that of the rows
    after which results go home.
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
    round: int


class ArenaBytes(NamedTuple):
    """Bytes of one rank's arena in one phase.

    Attributes:
        server_in: rows from other homes, for this rank's tasks.
        home_in: results for this rank's own rows, which come home.
        scratch: key gradients before they are sent home.
    """

    server_in: int
    home_in: int
    scratch: int

    @property
    def total(self) -> int:
        """Bytes of the whole arena."""
        return sum(self)


@dataclasses.dataclass(frozen=True)
class PlanStats:
    """What a plan does, over all ranks. Loads are in units of the cost model, times query heads.

    Ranks may differ in speed. A load *at mean speed* is what a server of mean speed would do in the time that this rank
    takes: the load times the mean speed of the servers over the rank's own. Without ``speeds`` it is the load.

    Attributes:
        load_before: load of each rank with every row computed at home.
        load: load of each rank as planned.
        speeds: speed of each rank; 1 for all unless `plan` was told.
        lower_bound: no plan has a smaller `largest`.
        num_servers: number of ranks that compute tasks.
        head_parallel: for each document whose ranks exchange rows for heads, how many ranks, at most, do so together.
        bytes: bytes between ranks for each message: forward_in, forward_out, backward_in, backward_out.
        bytes_between_nodes: the part of these bytes that goes from one node to another.
        arena_bytes: for each phase, forward and backward, the arena of every rank.
        retained_bytes: bytes that each rank, as a server, retains from a step's forward to its backward.
        saved_bytes: bytes that backward_in would have in addition if nothing were retained.
        binding: what keeps the largest load above the tolerance: None (it is within), ``"single rows"`` (no single row
            can move with gain), ``"capacity of rank 3"`` (the rank whose arena would need most), ``"balance off"`` or
            ``"given tasks"``. ``imbalance_after`` tells how near it came.
        wanted_slot_bytes: ``slot_bytes`` of the plan that would be made without a capacity.
        plan_ms: time that planning took, in milliseconds.
    """

    load_before: list[int]
    load: list[int]
    speeds: list[int]
    lower_bound: int
    num_servers: int
    head_parallel: dict[int, int]
    bytes: dict[str, int]
    bytes_between_nodes: dict[str, int]
    arena_bytes: dict[str, list[ArenaBytes]]
    retained_bytes: list[int]
    saved_bytes: int
    binding: str | None
    wanted_slot_bytes: int
    plan_ms: float
    _servers: list[int] = dataclasses.field(repr=False)  # empty: all ranks
    _core: _C.Plan = dataclasses.field(repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_byte_lower_bounds": self._byte_lower_bounds, "_core": None}

    @functools.cached_property
    def _byte_lower_bounds(self) -> tuple[int, int]:
        return self._core.byte_lower_bounds()

    @property
    def bytes_lower_bound(self) -> int:
        """No plan within the tolerance moves fewer bytes, in all messages or in those of the objective.

        It is computed when asked for. For cost models with rates it is 0, which says nothing.
        """
        return self._byte_lower_bounds[0]

    @property
    def bytes_between_nodes_lower_bound(self) -> int:
        """The lower bound of the bytes that go from one node to another."""
        return self._byte_lower_bounds[1]

    @property
    def largest_before(self) -> float:
        """The largest load at mean speed, with every row computed at home."""
        return self._largest(self.load_before)

    @property
    def largest(self) -> float:
        """The largest load at mean speed, as planned. The step waits for the rank that has it."""
        return self._largest(self.load)

    @property
    def imbalance_before(self) -> float:
        """`largest_before` over what it would be if every rank had its share by speed; 1 if there is no load."""
        return self._over_share(self.load_before, sum(self.speeds))

    @property
    def imbalance_after(self) -> float:
        """`largest` over the mean load of the servers, as planned; 1 if there is no load."""
        return self._over_share(self.load, self._speed_of_servers)

    @property
    def gap(self) -> float:
        """How far `largest` is above its lower bound, as a fraction of the bound."""
        return self.largest / self.lower_bound - 1.0 if self.lower_bound else 0.0

    @property
    def _speed_of_servers(self) -> int:
        return sum(self.speeds[rank] for rank in self._servers) if self._servers else sum(self.speeds)

    def _largest(self, loads: list[int]) -> float:
        speed = self._speed_of_servers
        return max(load * speed / (self.num_servers * own) for load, own in zip(loads, self.speeds, strict=True))

    def _over_share(self, loads: list[int], speed: int) -> float:
        """The largest load over the share that its rank has of the whole, if all ranks together have that speed."""
        total = sum(loads)
        shares = (load * speed / (total * own) for load, own in zip(loads, self.speeds, strict=True) if total)
        return max(shares, default=1.0)

    @property
    def slot_bytes(self) -> int:
        """The largest arena of any rank and phase: what a slot of the context's heap must hold."""
        return max(arena.total for arenas in self.arena_bytes.values() for arena in arenas)
