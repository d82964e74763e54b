"""Steps of `distca train` on documents of given lengths, on two ranks of this machine.

The first step is the reference that all others are compared with. A round takes it before and after every two others.
A step's time is relative to the mean of the two references around it. A single fast or slow reference therefore moves
two steps of one round, and a machine that grows slower within a round moves none.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import distca
from distca.apps.common.memory_log import Watch
from distca.apps.common.packing import NO_TARGET
from distca.apps.train.checkpoint import Trained
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batch
from distca.apps.train.data_parallel import DataParallel, MicroBatches
from distca.apps.train.iterations import planned_iterations
from distca.apps.train.micro_batches import planned
from distca.apps.train.pipelined import Iteration
from distca.apps.train.split_run import SplitRun
from distca.apps.train.step import train_step
from distca.apps.train.work import Work

RANKS = 2
VOCABULARY = 1024
#: Steps between two references.
BETWEEN = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training on two ranks.

    Attributes:
        name: its name in tables.
        documents: for each micro-batch, for each data rank, the lengths of its documents.
        hidden, layers, heads, kv_heads: the shape of the tiny Llama of `distca train`.
        how: ``"off"`` for no balance, ``"single"`` for balance in a single stream, or ``"ping-pong"``.
        link: bytes a second and seconds of latency of an emulated link; None: shared memory.
        pipeline: stages, of one data rank each if there are two.
        recompute: whether a layer's forward is run again in its backward.
        fsdp: whether weights, gradients and optimizer are sharded.
    """

    name: str
    documents: tuple[tuple[tuple[int, ...], ...], ...]
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    how: str = "single"
    link: tuple[float, float] | None = None
    pipeline: int = 1
    recompute: bool = False
    fsdp: bool = False

    @property
    def config(self) -> TrainConfig:
        """The options of `distca train`."""
        tokens = max(sum(of_rank) for micro_batch in self.documents for of_rank in micro_batch)
        return TrainConfig(
            ranks=RANKS,
            tokens_per_rank=tokens,
            accumulate=len(self.documents),
            pipeline=self.pipeline,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            balance="off" if self.how == "off" else "on",
            ping_pong=self.how == "ping-pong",
            checkpoint_activations=self.recompute,
            fsdp=self.fsdp,
        )

    def batches(self, rank: int) -> list[Batch]:
        """The micro-batches of a data rank, of random tokens."""
        generator = torch.Generator().manual_seed(rank)
        made = []
        for micro_batch in self.documents:
            layout = distca.Layout.from_documents([list(of_rank) for of_rank in micro_batch])
            ids = torch.randint(VOCABULARY, (1, layout.num_rows(rank)), generator=generator)
            labels, row = ids.roll(-1), 0
            for _, begin, end in layout.segments(rank):
                row += end - begin
                labels[0, row - 1] = NO_TARGET
            targets = tuple(n - 1 for n in layout.document_lengths)
            made.append(Batch(layout, ids, labels, sum(targets), targets))
        return made


class Timed(NamedTuple):
    """A step on one rank. All are seconds of the monotonic clock, which the ranks share."""

    begin: float
    end: float
    #: The ends of the phases of the step: name and time.
    points: list[tuple[str, float]]
    #: Seconds of attending, and of waiting in steps of attention.
    attending: float
    waiting: float


class _Points(Watch):
    def __init__(self) -> None:
        self.points: list[tuple[str, float]] = []

    def note(self, point: str) -> None:
        self.points.append((point, time.monotonic()))


def in_order(number: int) -> list[int]:
    """The steps that a round takes, by number, of so many: 0 is the reference.

    Examples:
        >>> from distca.apps.bench.real_steps import in_order
        >>> in_order(6)
        [0, 1, 2, 0, 3, 4, 0, 5, 0]
    """
    order = [0]
    for first in range(1, number, BETWEEN):
        order += [*range(first, min(first + BETWEEN, number)), 0]
    return order


def relative(seconds: Sequence[Sequence[float]], order: Sequence[int]) -> list[list[float]]:
    """Times of each step over the mean of the references around it.

    Args:
        seconds: for each place of the order, of every round.
        order: as `in_order` has it.

    Returns:
        For each step, by number, the ratios of all rounds. Those of the reference are 1.
    """
    ratios: dict[int, list[float]] = {}
    for place, number in enumerate(order):
        before = max(at for at in range(place + 1) if order[at] == 0)
        after = min(at for at in range(place, len(order)) if order[at] == 0)
        around = zip(seconds[before], seconds[after], strict=True)
        ratios[number] = [
            2 * taken / (first + second) for taken, (first, second) in zip(seconds[place], around, strict=True)
        ]
    return [ratios[number] for number in sorted(ratios)]


def run_rank(steps: list[Step], rounds: int) -> list[list[Timed]]:
    """Runs the steps on this rank `in_order`, and backwards in every other round.

    Returns for each place of the order the times of all rounds.
    """
    torch.manual_seed(0)
    order = in_order(len(steps))
    timed: list[list[Timed]] = [[] for _ in order]
    with ExitStack() as stack:
        made = [_made(step, number, stack) for number, step in enumerate(steps)]
        for take, _ in made:  # the first of all makes the optimizer's state
            take(_Points())
        for number in range(rounds):
            for place in reversed(range(len(order))) if number % 2 else range(len(order)):
                _timed(*made[order[place]], timed[place])
    return timed


def _made(step: Step, number: int, stack: ExitStack) -> tuple[Callable[[_Points], object], distca.Context]:
    """A function that takes the step, and its context. Plans are made once."""
    config = step.config
    link = None if step.link is None else distca.Link(*step.link)
    init = partial(distca.init, name=f"bench/step-{number}", max_tokens=config.tokens_per_rank, link=link)
    trained: Trained
    if config.is_split:
        split = SplitRun(config, VOCABULARY)
        trained, part = split.trained, split._part
        context = stack.enter_context(init(heads=split._heads, pipeline_parallel=split._split.mesh["pp"]))
        with planned_iterations(config, step.batches(split.data_rank), context, part.shape) as iterations:
            batches, plans = next(iterations)

        def work() -> Work:
            return Iteration(part, batches, plans, context)
    else:
        run = DataParallel(config, VOCABULARY)
        trained, windows = run.trained, run._windows
        context = stack.enter_context(init(heads=run._heads))
        balance = step.how != "off"
        with planned(config, step.batches(run.data_rank), context, windows, balance=balance) as found:
            micro_batches = list(found)

        def work() -> Work:
            return MicroBatches(micro_batches, windows, context)

    def take(points: _Points) -> None:
        train_step(trained, work(), False, time.perf_counter(), points)

    context.start_trace()
    return take, context


def _timed(take: Callable[[_Points], object], context: distca.Context, into: list[Timed]) -> None:
    """Takes the step twice, as training repeats it, and times the second.

    The first one pays for memory in which another step has left tensors of other sizes.
    """
    take(_Points())
    points = _Points()
    context.take_trace()
    dist.barrier()
    begin = time.monotonic()
    take(points)
    end = time.monotonic()
    trace = context.take_trace()
    waiting = sum(span.seconds for span in trace.spans if span.is_wait)
    into.append(Timed(begin, end, points.points, trace.attending, waiting))
