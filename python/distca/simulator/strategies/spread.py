"""distca in a single stream, where a long document has as many homes as its keys leave for, each with both ends."""

from __future__ import annotations

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class Spread(Strategy):
    """Plans of ``distca.plan(reduce_dtype=...)`` on the rows of `distca.Layout.spread` over the context ranks.

    Contributions to key gradients travel in the dtype of activations, as in the rings of context parallelism. Rows
    travel in the rounds of the plan.
    """

    name = "distca-spread"
    about = "distca's plans in a single stream, long documents on as many context ranks as their keys leave for"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, without halves."""
        layouts = case.layouts(lambda lengths, ranks: Layout.spread(lengths, ranks=ranks))
        return Ticking(case, ping_pong=False, layouts=layouts, reduce_dtype=case.heads.dtype)
