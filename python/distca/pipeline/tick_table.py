"""Which pipeline stage does what in each tick: all stages do the same phase, and a stage without work serves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, overload

from distca.arguments import is_whole
from distca.errors import InvalidArgumentError


class Work(NamedTuple):
    """What a stage does in a tick: one of its chunks of layers, for one micro-batch.

    Attributes:
        microbatch: number of the micro-batch.
        chunk: number of the chunk of layers among those of the stage; 0 without interleaving.
    """

    microbatch: int
    chunk: int = 0


class Tick(NamedTuple):
    """A tick: what every stage does at the same time.

    Attributes:
        phase: ``"forward"`` or ``"backward"``, of all stages.
        work: for each stage its work, or None for a stage that only serves attention of the others.
    """

    phase: str
    work: tuple[Work | None, ...]


class TickTable(Sequence[Tick]):
    """The ticks of one iteration, in order. `tick_table` makes it. Printed, it is a picture.

    Attributes:
        stages: number of pipeline stages.
        microbatches: number of micro-batches in an iteration.
        chunks: number of chunks of layers of each stage.
    """

    def __init__(self, ticks: Sequence[Tick], stages: int, microbatches: int, chunks: int) -> None:
        self.stages, self.microbatches, self.chunks = stages, microbatches, chunks
        self._ticks = tuple(ticks)
        self._numbers = {
            (tick.phase, stage, work): number
            for number, tick in enumerate(self._ticks)
            for stage, work in enumerate(tick.work)
            if work is not None
        }

    @overload
    def __getitem__(self, index: int) -> Tick: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tick, ...]: ...
    def __getitem__(self, index: int | slice) -> Tick | tuple[Tick, ...]:
        return self._ticks[index]

    def __len__(self) -> int:
        return len(self._ticks)

    @property
    def has_backward(self) -> bool:
        """Whether there are backward ticks. A table for evaluation has none."""
        return any(tick.phase == "backward" for tick in self._ticks)

    def position(self, stage: int, chunk: int) -> int:
        """The place of a stage's chunk in the model, counted from 0 at its first layers."""
        return chunk * self.stages + stage

    def tick_of(self, phase: str, stage: int, work: Work) -> int:
        """The number of the tick in which a stage does that phase of that work."""
        return self._numbers[phase, stage, work]

    def handed_to(self, tick: int, stage: int) -> Work | None:
        """The work of this stage whose input another stage has made in that tick, or None.

        In a forward tick the stage before hands over activations, in a backward tick the stage after hands over
        gradients. With several chunks the last stage is followed by the first one's next chunk.
        """
        forward = self._ticks[tick].phase == "forward"
        neighbour = (stage - 1 if forward else stage + 1) % self.stages
        work = self._ticks[tick].work[neighbour]
        if work is None:
            return None
        position = self.position(neighbour, work.chunk) + (1 if forward else -1)
        if not 0 <= position < self.stages * self.chunks:
            return None
        return Work(work.microbatch, position // self.stages)

    def in_flight(self, stage: int) -> int:
        """The most chunks whose activations the stage holds at one time; 0 in evaluation, which holds none."""
        held = most = 0
        if not self.has_backward:
            return 0
        for tick in self._ticks:
            if tick.work[stage] is not None:
                held += 1 if tick.phase == "forward" else -1
                most = max(most, held)
        return most

    def in_flight_of_1f1b(self, stage: int) -> int:
        """The same number for 1F1B (interleaved 1F1B for several chunks), whose ticks mix both phases."""
        if not self.has_backward:
            return 0
        if self.chunks == 1:
            return min(self.microbatches, self.stages - stage)
        first = (self.chunks + 1) * self.stages - 1 - 2 * stage
        return min(self.microbatches * self.chunks, first)

    def __str__(self) -> str:
        def cell(phase: str, work: Work | None) -> str:
            if work is None:
                return "."
            return f"{phase[0].upper()}{work.microbatch}" + (chr(ord("a") + work.chunk) if self.chunks > 1 else "")

        width = max(len(cell(tick.phase, work)) for tick in self._ticks for work in tick.work)
        lines = []
        for stage in range(self.stages):
            cells = " ".join(f"{cell(tick.phase, tick.work[stage]):>{width}}" for tick in self._ticks)
            lines.append(f"stage {stage}: {cells}   holds {self.in_flight(stage)} ({self.in_flight_of_1f1b(stage)})")
        kind = "1F1B" if self.chunks == 1 else "interleaved 1F1B"
        note = f"{len(self)} ticks; '.' serves; holds: activations in flight (those of {kind})"
        return "\n".join([*lines, note])

    def __repr__(self) -> str:
        return (
            f"TickTable({self.stages} stages, {self.microbatches} micro-batches, {self.chunks} chunks, "
            f"{len(self)} ticks)"
        )


def tick_table(
    stages: int, microbatches: int, *, chunks: int = 1, in_flight: int | None = None, backward: bool = True
) -> TickTable:
    """The shortest table of ticks in which all stages do the same phase.

    Core attention can be balanced over all ranks of a tick only if all do the same phase. With `n = microbatches *
    chunks` there are ``2 * (n + stages - 1)`` ticks, each of `1 / chunks` of a stage's layers: as many as 1F1B has
    slots, and fewer are impossible. A stage holds the activations of at most ``min(n, (chunks + 1) * stages - 1 - 2 *
    stage)`` chunks. For one chunk that is nearly twice what 1F1B holds; for several it is what interleaved 1F1B holds.

    `in_flight` takes more ticks to hold less. The table is then found by a search. No table is shorter where this can
    be tried out (the tests do so), and none is known to be shorter beyond.

    Args:
        stages: number of pipeline stages.
        microbatches: number of micro-batches in an iteration. With several chunks, a multiple of `stages`.
        chunks: number of chunks of layers of each stage (interleaving, virtual stages).
        in_flight: the most micro-batches whose activations a stage may hold at one time, for one chunk a stage. By
            default as many as the shortest table needs; ``2 * stages - 1`` always are enough for it.
        backward: False leaves the forward ticks only, for evaluation. They hold nothing, whatever `in_flight` is.

    Returns:
        The table.

    Raises:
        InvalidArgumentError: a number is not a positive integer, several chunks have a number of micro-batches that is
            not a multiple of `stages`, or `in_flight` is given for several chunks.

    Examples:
        >>> table = distca.pipeline.tick_table(stages=3, microbatches=4)
        >>> print(table)
        stage 0: F0 F1 F2  . F3  .  . B0  . B1 B2 B3   holds 4 (3)
        stage 1:  . F0 F1  . F2 B0 F3 B1  . B2 B3  .   holds 3 (2)
        stage 2:  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .   holds 1 (1)
        12 ticks; '.' serves; holds: activations in flight (those of 1F1B)
    """
    for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not is_whole(value, 1):
            raise InvalidArgumentError(f"tick_table: {name} = {value!r}; a positive integer is expected")
    if chunks > 1 and microbatches % stages:
        raise InvalidArgumentError(
            f"tick_table: {microbatches} micro-batches with {chunks} chunks a stage; a multiple of the {stages} stages "
            "is expected"
        )
    if in_flight is not None and (chunks > 1 or not is_whole(in_flight, 1)):
        raise InvalidArgumentError(
            f"tick_table: in_flight = {in_flight!r} with {chunks} chunks a stage; None, or a positive integer with one "
            "chunk a stage, is allowed"
        )
    if in_flight is not None and backward and in_flight < min(microbatches, 2 * stages - 1):
        return TickTable(_limited_ticks(stages, microbatches, in_flight), stages, microbatches, chunks)
    num_works = microbatches * chunks
    num_ticks = num_works + stages - 1  # of one phase

    def nth(n: int, phase: str) -> Work | None:
        """The n-th work of every stage in that phase. It begins n ticks after the stage's first one."""
        if not 0 <= n < num_works:
            return None
        group, rest = divmod(n, stages * chunks)  # a group is as many micro-batches as there are stages
        chunk, microbatch = divmod(rest, stages) if chunks > 1 else (0, rest)
        return Work(group * stages + microbatch, chunk if phase == "forward" else chunks - 1 - chunk)

    # In forward tick f, stage s does its work number f - s. In backward tick b, it does number b - (stages - 1 - s).
    last = stages - 1
    done_by_last = {nth(n, "forward"): n + last for n in range(num_works)}
    ticks: list[Tick] = []
    forward_ticks = backward_ticks = 0
    while forward_ticks < num_ticks or (backward and backward_ticks < num_ticks):
        first = nth(backward_ticks, "backward")  # what the last stage would begin with; None where it has ended
        is_ready = forward_ticks == num_ticks or first is None or done_by_last[first] < forward_ticks
        if backward and is_ready:
            works = tuple(nth(backward_ticks - (last - s), "backward") for s in range(stages))
            ticks.append(Tick("backward", works))
            backward_ticks += 1
        else:
            ticks.append(Tick("forward", tuple(nth(forward_ticks - s, "forward") for s in range(stages))))
            forward_ticks += 1
    return TickTable(ticks, stages, microbatches, chunks)


#: States that the search of `_limited_ticks` keeps at each tick.
_KEPT = 256
#: For each stage, how many micro-batches it has done forward, and how many backward.
_Done = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(maxsize=32)
def _limited_ticks(stages: int, microbatches: int, in_flight: int) -> list[Tick]:
    """The fewest ticks that are found in which no stage holds more than `in_flight` micro-batches.

    In a tick every stage does what it may. Therefore the phases of the ticks are all that is searched: from tick to
    tick, by what the stages have done so far. Of very many such states those are kept in which most is done.
    """
    # A stage that holds more than this is not sooner done: the shortest table of all holds no more.
    most = [min(in_flight, 2 * (stages - stage) - 1) for stage in range(stages)]

    def after(done: _Done, phase: str) -> _Done:
        forward, backward = done
        if phase == "forward":
            given = (microbatches, *forward)  # what the stage before has done
            able = [n < given[s] and n - backward[s] < most[s] for s, n in enumerate(forward)]
            return tuple(n + can for n, can in zip(forward, able, strict=True)), backward
        given = (*backward[1:], microbatches)
        able = [n < min(forward[s], given[s]) for s, n in enumerate(backward)]
        return forward, tuple(n + can for n, can in zip(backward, able, strict=True))

    done: _Done = (0,) * stages, (0,) * stages
    end: _Done = (microbatches,) * stages, (microbatches,) * stages
    came_from: dict[_Done, tuple[_Done, str]] = {}
    level = [done]
    while end not in came_from:
        following = []
        for before in level:
            for phase in ("forward", "backward"):
                done = after(before, phase)
                if done != before and done not in came_from:
                    came_from[done] = before, phase
                    following.append(done)
        following.sort(key=lambda each: (-sum(each[0]) - sum(each[1]), each))
        level = following[:_KEPT]
    ticks = []
    done = end
    while done in came_from:
        before, phase = came_from[done]
        now, then = (each[phase == "backward"] for each in (done, before))
        ticks.append(Tick(phase, tuple(Work(b) if a > b else None for a, b in zip(now, then, strict=True))))
        done = before
    return ticks[::-1]
