"""Variable-length chunks: every chunk has the same attention, and as many tokens as that takes."""

from __future__ import annotations

import heapq

from distca.planner.layout import Layout
from distca.simulator.case import Case, Documents, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward


class VariableChunks(Strategy):
    """Whole documents of all micro-batches are dealt anew, the costliest first, to the chunk with least attention.

    Attention is counted by the pairs that are visible. Of chunks with equally little the one with fewest tokens takes
    the document. Tokens, and with them the rest of a layer and the activations, are what they become.
    """

    name = "variable-chunks"
    about = "whole documents, dealt so that chunks have equal attention and unequal tokens"
    cuts = False

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the chunks."""
        return OneForwardOneBackward(case, [Layout.from_documents(of) for of in deal(case.documents)])


def deal(documents: Documents) -> Documents:
    """The same documents in as many micro-batches and homes, with equal attention as far as whole documents allow."""
    homes = len(documents[0])
    chunks: list[list[int]] = [[] for _ in range(len(documents) * homes)]
    heap = [(0, 0, number) for number in range(len(chunks))]
    for length in sorted((n for micro_batch in documents for of in micro_batch for n in of), reverse=True):
        pairs, tokens, number = heap[0]
        chunks[number].append(length)
        heapq.heapreplace(heap, (pairs + length * (length + 1) // 2, tokens + length, number))
    return [chunks[first : first + homes] for first in range(0, len(chunks), homes)]
