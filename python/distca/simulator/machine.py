"""All homes at work: one stream of computation each, and what each has done when."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from distca.calls import Call
from distca.simulator.dense import Part
from distca.simulator.device import Device
from distca.simulator.network import NEVER, Network
from distca.simulator.work import AttentionWork, Round


@dataclasses.dataclass(frozen=True)
class Event:
    """What the homes did in one part of the step, each ``[homes]`` in seconds from its beginning.

    Attributes:
        what: ``"dense"``, ``"attention"``, ``"copy"``, ``"wait"`` or ``"optimizer"``.
        begin, end: equal for a home that had nothing to do.
        phase: ``"forward"`` or ``"backward"``.
        call: the call of core attention that it belongs to, if any.
    """

    what: str
    begin: torch.Tensor
    end: torch.Tensor
    phase: str
    call: Call | None = None


class TooSlow(Exception):
    """A step takes longer than it may."""


@dataclasses.dataclass(frozen=True)
class Deadline:
    """When a step is too slow.

    Attributes:
        seconds: it may take less than that.
        work: what the mean home at least computes and exchanges in the step, in seconds.
        finish: seconds of the end of the step, after all of that.
    """

    seconds: float
    work: float
    finish: float


class AttentionStep:
    """A step of attention under way: when its rows have come, by rounds, and when its results have come home."""

    def __init__(self, work: AttentionWork, rounds: Sequence[Round]) -> None:
        self.work, self.rounds = work, rounds
        self.home = torch.full_like(work.at_once, NEVER)
        self.arrived = [self.home] * len(rounds)


class Machine:
    """The homes of a cluster.

    Attributes:
        network: their links.
        device: what each computes with.
        now: ``[homes]`` seconds up to which each has computed or waited.
        dense, attention, copying, exchanging: ``[homes]`` seconds of computation, of copying rows, and of what tensor
            parallelism exchanges.
        events: what happened, in the order of the calls; empty unless it is recorded.
        even: whether every home has an equal share of the attention, to see what an unequal one costs.

    Args:
        record: whether there are events.
        deadline: when the step is too slow: `TooSlow` is raised.
        paces: for all dense parts and attention, in the order of the calls, ``[homes]`` how many times as long they
            take.
    """

    def __init__(
        self,
        network: Network,
        device: Device,
        *,
        record: bool = False,
        even: bool = False,
        deadline: Deadline | None = None,
        paces: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.network, self.device, self._deadline = network, device, deadline
        self._paces = None if paces is None else iter(paces)
        zeros = torch.zeros(network.ranks, dtype=torch.float64)
        self.now, self.dense, self.attention, self.copying, self.exchanging = (zeros for _ in range(5))
        self.events: list[Event] = []
        self.phase = "forward"
        self.even = even
        self._record = record

    def compute(self, part: Part) -> None:
        """Computes a part of a layer, after the collectives of tensor parallelism that it needs."""
        exchanged = self.network.among_tensor_ranks(self.now, part.collective, part.steps)
        self.exchanging = self.exchanging + (exchanged - self.now)
        self.wait_until(exchanged)
        self._dense(part.seconds)
        if self._deadline is not None:
            self._check(self._deadline)

    def _check(self, deadline: Deadline) -> None:
        """Raises TooSlow if what the mean home still has to do ends after the deadline."""
        idle = self.now - self.dense - self.attention - self.exchanging
        if float(idle.mean()) + deadline.work + deadline.finish >= deadline.seconds:
            raise TooSlow

    def optimize(self, seconds: float) -> None:
        """Takes the step of the optimizer."""
        self.dense = self.dense + seconds
        self._advance("optimizer", self.now + seconds)

    def copy_in_memory(self, num_bytes: float) -> None:
        """Reads and writes so many bytes of a rank's own memory, in one kernel."""
        self._dense(torch.full_like(self.now, 2 * num_bytes / self.device.memory_bandwidth + self.device.launch))

    def wait_until(self, when: torch.Tensor, call: Call | None = None) -> None:
        """Lets each home wait until a time of its own."""
        self._advance("wait", torch.maximum(self.now, when), call)

    def dispatch(self, work: AttentionWork, call: Call) -> AttentionStep:
        """Begins a step: rows leave for their servers, and each home lets its peers write (credit)."""
        # What ranks move themselves is modelled as one round: a rank computes nothing while it moves rows.
        in_rounds = work.rounds and not self.even and self.device.copy_bandwidth is None
        later = work.evenly if self.even else work.later
        step = AttentionStep(work, work.rounds if in_rounds else [Round(later, work.inward, work.homeward)])
        self._dense(torch.full_like(self.now, self.device.call_overhead), call)
        granted = self.now
        if self.device.copy_bandwidth is not None:
            self.wait_until(self.network.granted(granted, work.inward), call)
        begin = self.now
        self._copy(work.inward.sent, call)
        step.arrived = [self.network.send(begin, r.inward, credits=granted, rows=True) for r in step.rounds]
        return step

    def attend(self, step: AttentionStep, call: Call) -> None:
        """Computes tasks of own rows, then those of each round of rows, and sends results home. The steps of a ring
        come between; where rows come as well, a ring begins with them.
        """
        work = step.work
        self._attend(self._own(work.at_once), call)
        if work.ring:
            self.wait_until(step.arrived[0], call)
        for of_ring in work.ring:
            self._copy(of_ring.passed.sent, call)
            passed = self.network.send(self.now, of_ring.passed, rows=True)
            self._attend(self._own(of_ring.seconds), call)
            self.wait_until(passed, call)
        for arrived, of_round in zip(step.arrived, step.rounds, strict=True):
            self.wait_until(arrived, call)
            self._attend(of_round.seconds, call)
            begin = self.now
            self._copy(of_round.homeward.sent, call)
            step.home = torch.maximum(step.home, self.network.send(begin, of_round.homeward, rows=True))

    def _own(self, seconds: torch.Tensor) -> torch.Tensor:
        """What each home attends of its own; nothing if all attention is dealt evenly."""
        return torch.zeros_like(seconds) if self.even else seconds

    def collect(self, step: AttentionStep, call: Call) -> None:
        """Waits for the results, and takes them from where peers have put them."""
        self.wait_until(step.home, call)
        self._copy(step.work.homeward.received, call)

    def _copy(self, num_bytes: torch.Tensor, call: Call) -> None:
        """Copies so many bytes, if ranks do so themselves."""
        if self.device.copy_bandwidth is None or self.network.rows_are_free:
            return
        seconds = num_bytes / self.device.copy_bandwidth
        self.copying = self.copying + seconds
        self._advance("copy", self.now + seconds, call)

    def _attend(self, seconds: torch.Tensor, call: Call) -> None:
        seconds = self._paced(seconds)
        self.attention = self.attention + seconds
        self._advance("attention", self.now + seconds, call)

    def _paced(self, seconds: torch.Tensor) -> torch.Tensor:
        return seconds if self._paces is None else seconds * next(self._paces)

    def _dense(self, seconds: torch.Tensor, call: Call | None = None) -> None:
        seconds = self._paced(seconds)
        self.dense = self.dense + seconds
        self._advance("dense", self.now + seconds, call)

    def _advance(self, what: str, end: torch.Tensor, call: Call | None = None) -> None:
        if self._record:
            self.events.append(Event(what, self.now, end, self.phase, call))
        self.now = end
