"""`gather_documents`: whole documents on one rank each, for layers that carry something from row to row."""

from __future__ import annotations

import functools
import itertools

import torch

from distca.connect.row_exchange import RowExchange
from distca.context import Context
from distca.errors import InvalidArgumentError, refusals_told
from distca.planner.gathering import Gathering, gathering
from distca.planner.pieces import whole_pieces
from distca.planner.plan import Plan, Plans
from distca.registry import find_context


class GatheredDocuments:
    """Whole documents of a rank. `gather_documents` makes it.

    Attributes:
        rows: ``[R, ...]``, one document after another.
        lengths: the number of rows of each document. Padding counts as documents. On a rank that got no document it is
            ``[1]``: layers whose weights are spread over the ranks must run on all of them.
    """

    def __init__(
        self, rows: torch.Tensor, lengths: list[int], gathered: Gathering | None, exchange: RowExchange | None
    ) -> None:
        self.rows, self.lengths = rows, lengths
        self._gathered, self._exchange = gathered, exchange

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each document begins, and the end of the last one: int32 ``[N + 1]``, as kernels of packed rows take
        them.
        """
        bounds = [*itertools.accumulate(self.lengths, initial=0)]
        return torch.tensor(bounds, dtype=torch.int32, device=self.rows.device)

    def scatter(self, results: torch.Tensor) -> torch.Tensor:
        """Brings what was computed of `rows` back. All ranks call it. Gradients go the other way.

        Args:
            results: ``[R, ...]``, a row for each of `rows`, of any dtype and the same shape of a row on all ranks.

        Returns:
            ``[T, ...]``, the results of this rank's own rows.

        Raises:
            InvalidArgumentError: there are not as many results as rows.
            PeerDiedError, PeerTimeoutError: a rank has ended, or does not come.
        """
        if not isinstance(results, torch.Tensor):
            raise InvalidArgumentError(f"scatter: results are a {type(results).__name__}; a torch.Tensor is expected")
        if results.shape[:1] != self.rows.shape[:1]:
            raise InvalidArgumentError(
                f"scatter: results have shape {list(results.shape)}; {len(self.rows)} rows are expected"
            )
        return results if self._gathered is None else self._gathered.scatter(results, self._exchange)


def gather_documents(
    rows: torch.Tensor, plan: Plan | Plans, *, context: str | Context = "default"
) -> GatheredDocuments:
    """Brings the rows of each document of the plan's layout together on one rank. All ranks call it.

    It is for layers that carry something from row to row other than by attention, such as state spaces, linear
    attention and short convolutions, where documents may be cut between ranks::

        documents = distca.gather_documents(x, plan)
        y = mixer(documents.rows, documents.cu_seqlens)  # each document by itself
        x = x + documents.scatter(y)

    A document that lies whole on a rank stays there; a layout without other documents moves nothing. Documents that are
    cut go, the longest first, to the rank that has the fewest rows by then. A document that begins with rows of others
    (``Layout(branches=)``) comes with these, and `scatter` takes the results of its own rows.

    Rows go over a private group of ``torch.distributed`` (gloo, or NCCL for rows on a GPU), which the first call makes.

    Args:
        rows: ``[T, ...]``: this rank's rows, as its slice of the plan has them, padding included. Of any dtype.
        plan: the plan of the step, or one of several with the same layout.
        context: the context of the ranks, or its name.

    Returns:
        The documents of this rank. Their rows are differentiable.

    Raises:
        InvalidArgumentError: an argument is wrong.
        PeerDiedError, PeerTimeoutError: a rank has ended, or does not come within the context's timeout.
    """
    found = find_context(context)
    with refusals_told(found):
        if not isinstance(rows, torch.Tensor):
            raise InvalidArgumentError(
                f"gather_documents: rows are a {type(rows).__name__}; a torch.Tensor is expected"
            )
        if not isinstance(plan, Plan | Plans):
            raise InvalidArgumentError(
                f"gather_documents: plan is a {type(plan).__name__}; a distca.Plan or distca.Plans is expected"
            )
        layout, rank = plan.layout, plan.rank
        if rows.shape[:1] != (layout.num_rows(rank),):
            raise InvalidArgumentError(
                f"gather_documents: rows have shape {list(rows.shape)}, and the plan has {layout.num_rows(rank)} rows "
                f"on rank {rank}; [rows, ...] is expected"
            )
        gathered = gathering(layout, rank, rows.device)
        if gathered is None:
            return GatheredDocuments(rows, [end - begin for _, begin, end in whole_pieces(layout, rank)], None, None)
        if gathered.is_moved and (found is None or (found.rank, found.num_ranks) != (rank, layout.num_ranks)):
            where = "there is no such context" if found is None else f"it is rank {found.rank} of {found.num_ranks}"
            raise InvalidArgumentError(
                f"gather_documents: the plan is rank {rank}'s of {layout.num_ranks}, and of the context {context!r} "
                f"{where}"
            )
    exchange = found.row_exchange() if found is not None and gathered.is_moved else None
    return GatheredDocuments(gathered.gather(rows, exchange), gathered.lengths, gathered, exchange)
