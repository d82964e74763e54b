"""distca in ping-pong: two halves of each micro-batch take turns, and rows of one travel while the other computes."""

from __future__ import annotations

from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class PingPong(Strategy):
    """Plans of `distca.plan` for each half of `distca.halves`, in the order of calls of `distca.PingPong`."""

    name = "distca"
    about = "distca's plans in ping-pong"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """In every parallelism."""
        return True

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        return Ticking(case, ping_pong=True)
