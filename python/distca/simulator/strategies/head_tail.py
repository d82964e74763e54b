"""distca in ping-pong, where all context ranks are homes of every long document, each of one chunk from either end."""

from __future__ import annotations

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking


class HeadTail(Strategy):
    """Plans of `distca.plan` on the rows of `distca.Layout.head_tail`, for each half of `distca.halves`.

    A document is long if it has more tokens than half of a rank's rows. The keys of a long document leave through the
    ports of all its context parallel group. Short documents are whole, but for one at most on each border between
    ranks.
    """

    name = "distca-head-tail"
    about = "distca's plans in ping-pong, long documents cut head-tail over their context ranks"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        return Ticking(case, ping_pong=True, layouts=case.layouts(_cut))


def _cut(lengths: list[int], ranks: int) -> Layout:
    return Layout.head_tail(lengths, ranks=ranks, longer_than=sum(lengths) // (2 * ranks))
