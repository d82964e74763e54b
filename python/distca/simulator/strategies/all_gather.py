"""Per-document context parallelism with all-gather: a group cuts every document, and gathers keys in every layer.

Sources: Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2, gathers the keys and values of
the group and cuts the sequence into ``2 * ranks`` chunks, of which each rank has one from either end. WLB-LLM, arXiv
2503.17924, section 5, cuts every document like that. ``cp_comm_type = all_gather`` of Megatron-core is the same
exchange.

What differs: gathered keys are kept from forward to backward, and are not gathered again.
"""

from __future__ import annotations

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.setup import Model, Parallelism


class AllGather(Strategy):
    """The documents of ``context`` neighbouring ranks are cut head-tail over these ranks.

    Before attention the group gathers its keys and values, and keeps them to backward, where their gradients are
    reduced and scattered. Neither overlaps with computation. With ``context = 1`` nothing is cut and nothing gathered.
    """

    name = "all-gather"
    about = "every document cut over its context parallel group, keys gathered in every layer"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1 and parallelism.chunks == 1

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the cut documents."""
        return OneForwardOneBackward(case, cut_by_document(case), gather=case.parallelism.context)


def cut_by_document(case: Case) -> list[Layout]:
    """For each micro-batch its rows: the documents of each context parallel group are cut head-tail over its ranks."""
    return case.layouts(lambda lengths, ranks: Layout.head_tail(lengths, ranks=ranks))
