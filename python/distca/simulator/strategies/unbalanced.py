"""No balance: every rank computes the attention of the documents that it has."""

from __future__ import annotations

from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward


class Unbalanced(Strategy):
    """Documents stay where they are, whole. Context ranks are used as data ranks."""

    name = "unbalanced"
    about = "every rank computes its own documents"
    cuts = False

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the documents as they are."""
        return OneForwardOneBackward(case, [Layout.from_documents(of) for of in case.documents])
