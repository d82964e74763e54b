"""Per-document context parallelism with all-gather: what the other way to train on long documents does.

Each document is cut head-tail over the ranks of a group, so that all have as much attention of it. In every layer the
ranks gather all keys and values, and compute the attention of their own rows (Llama 3, arXiv 2407.21783, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention.bias import causal_lower_right

from distca.planner.layout import Layout


@dataclass(frozen=True)
class SharedDocuments:
    """The documents of a slot, whose rows are on several ranks.

    Attributes:
        layout: which rows each rank of the group has.
        rank: this process in the group.
        group: the ranks.
        device: of their rows.
    """

    layout: Layout
    rank: int
    group: dist.ProcessGroup
    device: torch.device

    @property
    def most(self) -> int:
        """The most rows of a rank."""
        return max(self.layout.num_rows(rank) for rank in range(self.layout.num_ranks))

    @cached_property
    def places(self) -> list[torch.Tensor]:
        """For each document the places of its rows in what is gathered, int64. Layers share them."""
        places = [torch.empty(length, dtype=torch.int64) for length in self.layout.document_lengths]
        for rank in range(self.layout.num_ranks):
            at = rank * self.most
            for document, begin, end in self.layout.segments(rank):
                places[document][begin:end] = torch.arange(at, at + end - begin)
                at += end - begin
        return [of_document.to(self.device) for of_document in places]


@dataclass
class SharedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed sequence parameters, with the documents that ranks share."""

    shared: Any = None


def attention_of_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: SharedDocuments, scale: float | None
) -> torch.Tensor:
    """Causal attention of this rank's rows, ``[T, H, D]``. It is collective over the group.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hkv, D]``.
        documents: whose rows these are.
        scale: of the scores; None stands for ``1 / sqrt(D)``.
    """
    mine = documents.layout.segments(documents.rank)
    gathered = _Gathered.apply(torch.stack([key, value], dim=1), documents)  # type: ignore[no-untyped-call]
    # Without rows of its own a rank takes part in backward too.
    outs, at = [query[:0] + gathered[:0].sum()], 0
    for document, begin, end in mine:
        q = query[at : at + end - begin].transpose(0, 1)[None]
        k, v = gathered[documents.places[document][:end]].permute(1, 2, 0, 3)[:, None].unbind()
        how: dict[str, Any] = {"is_causal": True} if begin == 0 else {"attn_mask": causal_lower_right(end - begin, end)}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **how)
        outs.append(out[0].transpose(0, 1))
        at += end - begin
    return torch.cat([*outs, torch.zeros_like(query[at:])])


class _Gathered(torch.autograd.Function):
    """The rows of all ranks of a group, ``[ranks * most, ...]``; backward adds up what the ranks make of them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, documents: SharedDocuments) -> torch.Tensor:
        ctx.documents, ctx.rows = documents, len(rows)
        mine = rows.new_zeros(documents.most, *rows.shape[1:])
        count = documents.layout.num_rows(documents.rank)
        mine[:count] = rows[:count]
        everyone = [torch.empty_like(mine) for _ in range(documents.layout.num_ranks)]
        dist.all_gather(everyone, mine, group=documents.group)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        documents = ctx.documents
        mine = gradient.new_empty(documents.most, *gradient.shape[1:])
        parts = list(gradient.contiguous().chunk(documents.layout.num_ranks))
        dist.reduce_scatter(mine, parts, group=documents.group)
        rows = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        count = documents.layout.num_rows(documents.rank)
        rows[:count] = mine[:count]
        return rows, None


def group_of(data_ranks: list[int], size: int) -> dist.ProcessGroup:
    """The group of this process: so many neighbours of its data ranks. All processes make those of all."""
    at = data_ranks.index(dist.get_rank()) // size * size
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, data_ranks[at : at + size])
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sorted(set(map(tuple, of_all)))])
    return mine
