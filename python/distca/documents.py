"""Rows of documents for layers that look along rows other than by attention: whole documents, and halos."""

from __future__ import annotations

import functools
import itertools

import torch

from distca.arguments import is_whole
from distca.connect.row_exchange import RowExchange
from distca.context import Context
from distca.errors import InvalidArgumentError, refusals_told
from distca.planner.gathering import Gathering, gathering
from distca.planner.halos import halos
from distca.planner.layout import Layout
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
        _check_results("scatter", results, self.rows)
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
        layout, rank = checked("gather_documents: rows", rows, plan)
        gathered = gathering(layout, rank, rows.device)
        if gathered is None:
            return GatheredDocuments(rows, [end - begin for _, begin, end in whole_pieces(layout, rank)], None, None)
        exchange = exchange_of("gather_documents", found, context, layout, rank, gathered.is_moved)
    return GatheredDocuments(gathered.gather(rows, exchange), gathered.lengths, gathered, exchange)


class PaddedPieces:
    """Pieces of documents, each behind the rows in front of it. `exchange_halos` makes it.

    Attributes:
        rows: ``[R, ...]``, one piece after another, each behind `width` rows.
    """

    def __init__(self, rows: torch.Tensor, own: torch.Tensor) -> None:
        self.rows = rows
        self._own = own

    def crop(self, results: torch.Tensor) -> torch.Tensor:
        """The results ``[T, ...]`` of this rank's own rows.

        Args:
            results: ``[R, ...]``, a row for each of `rows`.

        Raises:
            InvalidArgumentError: there are not as many results as rows.
        """
        _check_results("crop", results, self.rows)
        return results.index_select(0, self._own)


def exchange_halos(
    rows: torch.Tensor, plan: Plan | Plans, width: int, *, context: str | Context = "default"
) -> PaddedPieces:
    """Puts in front of each piece of a document the `width` rows before it, whichever rank has them. All ranks call it.

    It is for short causal convolutions, and other layers that look back at few rows::

        pieces = distca.exchange_halos(x, plan, conv.kernel_size[0] - 1)
        y = pieces.crop(causal_conv(pieces.rows))  # one call for all documents

    Where a document begins the rows are zeros. In front of a document that begins with rows of others
    (``Layout(branches=)``) are the last of these. Only the rows of halos travel, over the same private group as those
    of `gather_documents`.

    Args:
        rows: ``[T, ...]``: this rank's rows, as its slice of the plan has them, padding included. Of any dtype.
        plan: the plan of the step, or one of several with the same layout.
        width: how many rows before a row are looked at.
        context: the context of the ranks, or its name.

    Returns:
        The pieces of this rank. Their rows are differentiable.

    Raises:
        InvalidArgumentError: an argument is wrong.
        PeerDiedError, PeerTimeoutError: a rank has ended, or does not come within the context's timeout.
    """
    found = find_context(context)
    with refusals_told(found):
        layout, rank = checked("exchange_halos: rows", rows, plan)
        if not is_whole(width, 0, 2**31 - 1):
            raise InvalidArgumentError(f"exchange_halos: width is {width!r}; an int of at least 0 is expected")
        around = halos(layout, rank, width, rows.device)
        exchange = exchange_of("exchange_halos", found, context, layout, rank, around.is_moved)
    return PaddedPieces(around.pad(rows, exchange), around.own)


def checked(what: str, rows: torch.Tensor, plan: Plan | Plans) -> tuple[Layout, int]:
    """The plan's layout and rank, for rows that are as many as it has there.

    Args:
        what: the function and the argument, for errors.
        rows: ``[T, ...]``.
        plan: the plan.

    Raises:
        InvalidArgumentError: the arguments are of other types, or do not fit to each other.
    """
    function = what.partition(":")[0]
    if not isinstance(rows, torch.Tensor):
        raise InvalidArgumentError(f"{what} are a {type(rows).__name__}; a torch.Tensor is expected")
    if not isinstance(plan, Plan | Plans):
        raise InvalidArgumentError(
            f"{function}: plan is a {type(plan).__name__}; a distca.Plan or distca.Plans is expected"
        )
    layout, rank = plan.layout, plan.rank
    if rows.shape[:1] != (layout.num_rows(rank),):
        raise InvalidArgumentError(
            f"{what} have shape {list(rows.shape)}, and the plan has {layout.num_rows(rank)} rows on rank {rank}; "
            "[rows, ...] is expected"
        )
    return layout, rank


def exchange_of(
    function: str, found: Context | None, context: str | Context, layout: Layout, rank: int, is_moved: bool
) -> RowExchange | None:
    """The exchange of rows between the plan's ranks; None where no rows move.

    Raises:
        InvalidArgumentError: rows move, and the context is not that of the plan's ranks.
    """
    if not is_moved:
        return None
    if found is None or (found.rank, found.num_ranks) != (rank, layout.num_ranks):
        other = (
            f"there is no context {context!r}"
            if found is None
            else f"the context {found.name!r} is that of rank {found.rank} of {found.num_ranks}"
        )
        raise InvalidArgumentError(f"{function}: the plan is that of rank {rank} of {layout.num_ranks}, and {other}")
    return found.row_exchange()


def _check_results(function: str, results: torch.Tensor, rows: torch.Tensor) -> None:
    if not isinstance(results, torch.Tensor):
        raise InvalidArgumentError(f"{function}: results are a {type(results).__name__}; a torch.Tensor is expected")
    if results.shape[:1] != rows.shape[:1]:
        raise InvalidArgumentError(
            f"{function}: results have shape {list(results.shape)}; {len(rows)} rows are expected"
        )
