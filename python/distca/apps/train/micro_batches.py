"""Micro-batches: the batches of forward and backward with their plans, made while the one before is computed.

An optimizer step has `--micro-batches` micro-batches. The loss of a step is the mean over all targets of all its
micro-batches and ranks. Therefore each micro-batch knows the number of targets before the others are planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batch
from distca.context import Context
from distca.planner.layout import Window
from distca.planner.plan import Plan, Plans
from distca.planner.plan_ahead import PlanAhead


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a step on this rank.

    Attributes:
        parts: the batch with its plans; with ping-pong its two halves, each with its own plans.
        num_targets: targets of the whole step, of all micro-batches and ranks.
        last: whether it is the step's last micro-batch. After its backward the ranks add up their gradients.
    """

    parts: Sequence[tuple[Batch, Plan | Plans]]
    num_targets: int
    last: bool = True

    @property
    def plans(self) -> list[Plans]:
        """The plans of each part."""
        return [plans for _, plans in self.parts if isinstance(plans, Plans)]

    def arenas(self, rank: int) -> dict[str, int]:
        """The bytes that the plans take of the heap on a rank, in each phase."""
        # The halves are under way together, each in a slot of its own. The layers of one half follow each other.
        return {
            phase: sum(max(plan.stats.arena_bytes[phase][rank].total for plan in half.values()) for half in self.plans)
            for phase in ("forward", "backward")
        }


@contextmanager
def planned(
    config: TrainConfig, batches: Iterable[Batch], context: Context, windows: list[Window], *, balance: bool
) -> Iterator[Iterator[MicroBatch]]:
    """The micro-batches of all steps, one after the other."""
    window = windows[0] if len(set(windows)) == 1 else None

    def parts() -> Iterator[_Part]:
        for batch, num_targets, last in _in_steps(batches, config.micro_batches):
            for part in batch.halves(context.rank, window) if config.ping_pong else (batch,):
                yield _Part(part, num_targets, last)

    with PlanAhead(
        parts(),
        heads=context.layer_heads,
        context=context,
        layout=lambda part: part.batch.layout,
        windows=windows,
        tolerance=config.tolerance,
        balance=balance,
        overlap=config.ping_pong,
        retain_bytes=config.retain_bytes,
        reduce_dtype=config.torch_reduce_dtype,
    ) as ahead:
        yield _joined(ahead, 2 if config.ping_pong else 1)


@dataclass(frozen=True)
class _Part:
    batch: Batch
    num_targets: int
    last: bool


def _in_steps(batches: Iterable[Batch], size: int) -> Iterator[tuple[Batch, int, bool]]:
    """Each batch with the number of targets of its step, and whether it is the step's last one."""
    rest = iter(batches)
    while step := list(itertools.islice(rest, size)):
        num_targets = sum(batch.num_targets for batch in step)
        for number, batch in enumerate(step, 1):
            yield batch, num_targets, number == size


def _joined(ahead: Iterable[tuple[_Part | None, Plans]], num_parts: int) -> Iterator[MicroBatch]:
    # Every rank has the same number of batches; therefore `part` is never None.
    found = ((part, plans) for part, plans in ahead if part is not None)
    while parts := list(itertools.islice(found, num_parts)):
        first, _ = parts[0]
        yield MicroBatch([(part.batch, plans) for part, plans in parts], first.num_targets, first.last)
