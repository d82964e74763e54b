"""Per-document context parallelism: every document is cut over its group, which gathers all keys in every layer."""

from __future__ import annotations

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program
from distca.simulator.one_f_one_b import OneForwardOneBackward


class AllGather:
    """The documents of ``context`` neighbouring ranks are cut head-tail over these ranks.

    Before attention the group gathers its keys and values, and keeps them to backward, where their gradients are
    reduced and scattered. Neither overlaps with computation. With ``context = 1`` nothing is cut and nothing gathered.
    """

    name = "all-gather"
    about = "every document cut over its context parallel group, keys gathered in every layer"
    cuts = True

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the cut documents."""
        context = case.parallelism.context
        layouts = []
        for micro_batch in case.documents:
            parts = []
            for first in range(0, len(micro_batch), context):
                lengths = [n for of_home in micro_batch[first : first + context] for n in of_home]
                parts.append((Layout.head_tail(lengths, ranks=context), list(range(first, first + context))))
            layouts.append(Layout.join(parts, num_ranks=len(micro_batch)))
        return OneForwardOneBackward(case, layouts, gather=context)
