"""distca in ping-pong, where the homes of a document are all context ranks and each has one chunk from either end."""

from __future__ import annotations

from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.all_gather import cut_by_document
from distca.simulator.ticking import Ticking


class HeadTail(Strategy):
    """Plans of `distca.plan` on the rows of `distca.Layout.head_tail`, for each half of `distca.halves`.

    The ranks of a context parallel group then have equal attention before anything moves. Plans move what groups have
    unequally, and the keys of a long document leave through the ports of all its group.
    """

    name = "distca-head-tail"
    about = "distca's plans in ping-pong, every document cut head-tail over its context ranks"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        return Ticking(case, ping_pong=True, layouts=cut_by_document(case))
