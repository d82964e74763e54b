"""distca in ping-pong, with plans that move rows of all heads and no ranges of heads."""

from __future__ import annotations

from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class Rows(Strategy):
    """Plans of ``distca.plan(split_heads=False)`` for each half of `distca.halves`."""

    name = "distca-rows"
    about = "distca's plans in ping-pong, rows of all heads alone"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """If a tensor rank has several key/value heads."""
        return model.heads.divided(parallelism.tensor).kv > 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        return Ticking(case, ping_pong=True, split_heads=False)
