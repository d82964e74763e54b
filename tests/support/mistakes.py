"""Mistakes that one rank makes, and what all ranks are told of each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import distca
from distca.pipeline import CurrentTick, Ticks
from support.ranks import launch

TIMEOUT = 20.0

#: A program of one rank, told whether this rank makes the mistake.
Mistake = Callable[[distca.Context, bool], None]
#: What a rank is told: the type of the error, its message, and after how many seconds.
Told = tuple[str, str, float]


#: A stage: what `backward` is called with later.
Forward = Callable[[Ticks, CurrentTick], Any]


def iterate(
    ticks: Ticks,
    forward: Forward,
    *,
    serve: Callable[[CurrentTick], None] = CurrentTick.serve,
    backward: Callable[[Any], None] = torch.Tensor.backward,
) -> None:
    """An iteration in which stages hand nothing over: only the calls of attention and their order count."""
    outputs = {}
    for tick in ticks:
        if tick.work is None:
            serve(tick)
        elif tick.phase == "forward":
            outputs[tick.work] = forward(ticks, tick)
        else:
            backward(outputs.pop(tick.work))


class Mistakes(dict[str, tuple[Mistake, str]]):
    """Programs by name, each with the expected message. A decorator notes them."""

    def __call__(self, message: str) -> Callable[[Mistake], Mistake]:
        def note(function: Mistake) -> Mistake:
            self[function.__name__] = function, message
            return function

        return note

    def told(self, heads: distca.Heads, *, ranks: int, wrong_rank: int, max_tokens: int = 64) -> dict[str, list[Told]]:
        """For each mistake of a rank what each rank is told."""
        results = launch(
            _try_all, [function for function, _ in self.values()], heads, wrong_rank, max_tokens, ranks=ranks
        )
        return {name: [of_rank[i] for of_rank in results] for i, name in enumerate(self)}

    def assert_told_at_once(self, name: str, told: list[Told]) -> None:
        """Asserts that every rank has the expected message long before the timeout."""
        for rank, (kind, message, seconds) in enumerate(told):
            assert re.search(self[name][1], message), (rank, kind, message)
            assert kind in ("InvalidArgumentError", "PlanMismatchError", "PeerLeftError"), (rank, kind, message)
            assert seconds < TIMEOUT / 2, (rank, seconds)


def _try_all(functions: list[Mistake], heads: distca.Heads, wrong_rank: int, max_tokens: int) -> list[Told]:
    found = []
    for function in functions:
        dist.barrier()
        begun = time.monotonic()
        kind = message = ""
        with distca.init(max_tokens=max_tokens, heads=heads, timeout=TIMEOUT) as context:
            try:
                function(context, context.rank == wrong_rank)
            except distca.DistcaError as error:
                kind, message = type(error).__name__, str(error)
        found.append((kind, message, time.monotonic() - begun))
    return found
