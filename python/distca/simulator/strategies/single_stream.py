"""distca in a single stream: balanced plans; rows travel in rounds, and a layer computes one while the next travels."""

from __future__ import annotations

from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class SingleStream(Strategy):
    """Plans of `distca.plan` over all ranks, in a pipeline over all stages. Rows travel in the rounds of the plan."""

    name = "distca-single"
    about = "distca's plans in a single stream, rows in rounds"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """In every parallelism."""
        return True

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, without halves."""
        return Ticking(case, ping_pong=False)
