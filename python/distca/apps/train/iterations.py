"""Iterations of a pipeline: the micro-batches of a step, and the plans of all its ticks, made one step ahead."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from distca.apps.common.packing import NO_TARGET
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batch
from distca.context import Context
from distca.heads import Heads
from distca.pipeline import PipelinePlans
from distca.planner.ahead import Ahead
from distca.planner.exchange import Steps
from distca.planner.halves import halves
from distca.planner.layout import Layout, Window


@dataclass(frozen=True)
class Shape:
    """What the plans of a run's iterations need to know of the model.

    Attributes:
        heads: head shape of the whole model's attention layers.
        windows: the window of each attention layer of the model, in order.
        layers: the layers of each stage's chunks.
        attention: those of them that have attention.
        chunks: chunks of each stage.
    """

    heads: Heads
    windows: list[Window]
    layers: list[int]
    attention: list[int]
    chunks: int

    @property
    def window(self) -> Window:
        """The window of all layers, if they have the same one."""
        return self.windows[0] if len(set(self.windows)) == 1 else None


@contextmanager
def planned_iterations(
    config: TrainConfig,
    batches: Iterable[Batch],
    context: Context,
    shape: Shape,
    *,
    balance: bool | str = True,
    backward: bool = True,
) -> Iterator[Iterator[tuple[list[Batch], PipelinePlans]]]:
    """The micro-batches and the plans of all steps, one step after the other. A thread makes the next ones.

    Args:
        config: the options of the run.
        batches: the micro-batches of this rank.
        context: the context that runs the plans.
        shape: what the plans need to know of the model.
        balance: whether attention is balanced; ``"stages"`` balances it inside each stage.
        backward: whether the plans have backward ticks.
    """
    make = functools.partial(_plans, config=config, context=context, shape=shape, balance=balance, backward=backward)
    multiple = len(context.stages) if shape.chunks > 1 else 1  # interleaved chunks need as many
    with _Iterations(_Layouts(batches, config.micro_batches, multiple), make) as ahead:
        yield iter(ahead)


def _plans(
    layouts: list[Layout], config: TrainConfig, context: Context, shape: Shape, balance: bool | str, backward: bool
) -> PipelinePlans:
    of_halves = [halves(layout, window=shape.window, idle_rows=1) for layout in layouts] if config.ping_pong else None
    plans = PipelinePlans(
        layouts,
        context.heads,
        stages=context.stages,
        layers=shape.attention,
        chunks=shape.chunks,
        windows=shape.windows,
        halves=of_halves,
        backward=backward,
        context=context,
        tolerance=config.tolerance,
        reduce_dtype=config.torch_reduce_dtype,
        balance=bool(balance),
        across_stages=balance != "stages",
    )
    _ = plans.stats  # made here, in the thread, and kept
    return plans


class _Iterations(Ahead[list[Batch], PipelinePlans]):
    def __init__(self, steps: _Layouts, make: functools.partial[PipelinePlans]) -> None:
        super().__init__(None, make)
        self._layouts = steps

    def _steps(self) -> _Layouts:
        return self._layouts


class _Layouts(Steps[list[Batch], list[Layout]]):
    """The micro-batches of each step, with their layouts. Every rank knows those of all ranks."""

    def __init__(self, batches: Iterable[Batch], micro_batches: int, multiple: int) -> None:
        """The last step may have fewer micro-batches, made up to a multiple of `multiple` by some without targets."""
        self._batches, self._size, self._multiple = batches, micro_batches, multiple
        self._rest: Iterator[Batch] | None = None

    def __next__(self) -> tuple[list[Batch], list[Layout]]:
        if self._rest is None:
            self._rest = iter(self._batches)
        step = list(itertools.islice(self._rest, self._size))
        if not step:
            raise StopIteration
        last = step[-1]
        idle = replace(last, labels=torch.full_like(last.labels, NO_TARGET), num_targets=0)
        step += [idle] * (-len(step) % self._multiple)
        return step, [batch.layout for batch in step]
