"""distca in ping-pong, where all context ranks are homes of every long document, each of one chunk from either end."""

from __future__ import annotations

import dataclasses

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import Ticking

#: The largest tolerance of tuned plans.
TUNED_TOLERANCE = 0.01


class HeadTail(Strategy):
    """Plans of `distca.plan` on the rows of `distca.Layout.head_tail`, for each half of `distca.halves`.

    A document is long if it has more tokens than half of a rank's rows. The keys of a long document leave through the
    ports of all its context parallel group. Short documents are whole, but for one at most on each border between
    ranks.

    Args:
        tuned: whether options of `distca.plan` are what these homes and ping-pong allow: contributions to key gradients
            travel in the dtype of activations, as in the rings of context parallelism (``reduce_dtype``), and the
            tolerance is 0.01. Else options are the defaults.
    """

    def __init__(self, *, tuned: bool) -> None:
        self.name = "distca-tuned" if tuned else "distca-head-tail"
        self.about = "distca's plans in ping-pong, long documents cut head-tail over their context ranks"
        if tuned:
            self.about += f"; contributions to key gradients in the model's dtype, tolerance {TUNED_TOLERANCE}"
        self._tuned = tuned

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        options = {}
        if self._tuned:
            case = dataclasses.replace(case, tolerance=min(case.tolerance, TUNED_TOLERANCE))
            options = {"reduce_dtype": case.heads.dtype}
        return Ticking(case, ping_pong=True, layouts=case.layouts(_cut), **options)


def _cut(lengths: list[int], ranks: int) -> Layout:
    return Layout.head_tail(lengths, ranks=ranks, longer_than=sum(lengths) // (2 * ranks))
