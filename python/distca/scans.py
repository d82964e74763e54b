"""`scan_documents`: a recurrence over whole documents, of which ranks share those that are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from distca.connect.row_exchange import RowExchange
from distca.context import Context
from distca.documents import checked, exchange_of
from distca.errors import InvalidArgumentError, refusals_told
from distca.planner.head_split import Documents, HeadSplit, head_split, heads_of_rank
from distca.planner.plan import Plan, Plans
from distca.registry import find_context

#: The results ``[R, heads, ...]`` of documents: of tensors of their rows, and of heads, by name.
Scan = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Documents], torch.Tensor]


def scan_documents(
    scan: Callable[..., torch.Tensor],
    rows: Mapping[str, torch.Tensor],
    plan: Plan | Plans,
    *,
    of_heads: Mapping[str, torch.Tensor] | None = None,
    context: str | Context = "default",
) -> torch.Tensor:
    """Runs a recurrence, such as linear attention or a state space, on each document of the plan's layout by itself.
    All ranks call it.

    Documents that lie whole on a rank are computed there. For those that are cut, each rank gets all rows of some of
    the heads, and gives the results back: ranks have the same work, however long a document is. So heads must not
    depend on each other in the recurrence; what else a layer computes goes before it or after it::

        def scan(q, k, v, g, beta, cu_seqlens):  # [R, heads, ...]: packed documents, of all heads or of some
            return chunk_gated_delta_rule(q[None], k[None], v[None], g[None], beta[None], cu_seqlens=cu_seqlens)[0][0]

        o = distca.scan_documents(scan, {"v": v, "q": q, "k": k, "g": g, "beta": beta}, plan)

    A document that begins with rows of others (``Layout(branches=)``) is computed with these. The rank calls `scan`
    for its whole documents, and for the cut ones, if it has such. With more ranks than heads some ranks compute no cut
    documents; they may call `scan` for a row of zeros, to know what it returns.

    Rows go over a private group of ``torch.distributed`` (gloo, or NCCL for rows on a GPU), which the first call makes.

    Args:
        scan: called with the tensors by their names and ``cu_seqlens``, int32 ``[N + 1]``, on the device of the rows:
            where each of its N documents begins, and the end of the last one. Returns ``[R, heads, ...]``.
        rows: tensors ``[T, heads, ...]`` of this rank's rows, as its slice of the plan has them, padding included. The
            first has a head for each of the result. Others may have fewer, each of which serves several that follow
            each other; `scan` gets as many of these as it needs: one for all, or equally many for each.
        plan: the plan of the step, or one of several with the same layout.
        of_heads: tensors ``[heads, ...]``, such as parameters; `scan` gets those of its heads.
        context: the context of the ranks, or its name.

    Returns:
        ``[T, heads, ...]``: the results of this rank's rows. Differentiable.

    Raises:
        InvalidArgumentError: an argument is wrong, or `scan` returned something else.
        PeerDiedError, PeerTimeoutError: a rank has ended, or does not come within the context's timeout.
    """
    found = find_context(context)
    of_heads = {} if of_heads is None else of_heads
    with refusals_told(found):
        if not isinstance(rows, Mapping) or not rows:
            what = "{}" if isinstance(rows, Mapping) else f"a {type(rows).__name__}"
            raise InvalidArgumentError(f"scan_documents: rows are {what}; tensors by their names are expected")
        for name, value in rows.items():
            layout, rank = checked(f"scan_documents: rows[{name!r}]", value, plan)
        _check_heads(rows, of_heads)
        split = head_split(layout, rank, next(iter(rows.values())).device)
        exchange = exchange_of("scan_documents", found, context, layout, rank, split.is_moved)

    def run(rows: Mapping[str, torch.Tensor], of_heads: Mapping[str, torch.Tensor], of: Documents) -> torch.Tensor:
        results = scan(**rows, **of_heads, cu_seqlens=of.cu_seqlens)
        expected = [*next(iter(rows.values())).shape[:2]]
        if not isinstance(results, torch.Tensor) or [*results.shape[:2]] != expected:
            found = list(results.shape) if isinstance(results, torch.Tensor) else f"a {type(results).__name__}"
            raise InvalidArgumentError(
                f"scan_documents: scan returned {found}; [{expected[0]}, {expected[1]}, ...] is expected"
            )
        return results

    return scan_split(run, rows, of_heads, split, rank, exchange)


def _check_heads(rows: Mapping[str, torch.Tensor], of_heads: Mapping[str, torch.Tensor]) -> None:
    first, *_ = rows
    for name, value in rows.items():
        if value.dim() < 2 or value.shape[1] == 0 or rows[first].shape[1] % value.shape[1]:
            raise InvalidArgumentError(
                f"scan_documents: rows[{name!r}] have shape {list(value.shape)}; [rows, heads, ...] is expected, and "
                f"the heads of rows[{first!r}] must be a multiple of its heads"
            )
    num_heads = rows[first].shape[1]
    if not isinstance(of_heads, Mapping):
        raise InvalidArgumentError(
            f"scan_documents: of_heads are a {type(of_heads).__name__}; tensors by their names are expected"
        )
    for name, value in of_heads.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidArgumentError(
                f"scan_documents: of_heads[{name!r}] is a {type(value).__name__}; a torch.Tensor is expected"
            )
        if value.shape[:1] != (num_heads,):
            raise InvalidArgumentError(
                f"scan_documents: of_heads[{name!r}] has shape {list(value.shape)}; [{num_heads}, ...] is expected"
            )
    if both := set(rows) & set(of_heads):
        raise InvalidArgumentError(f"scan_documents: {min(both)!r} is in rows and in of_heads")


def scan_split(
    scan: Scan,
    rows: Mapping[str, torch.Tensor],
    of_heads: Mapping[str, torch.Tensor],
    split: HeadSplit,
    rank: int,
    exchange: RowExchange | None,
) -> torch.Tensor:
    """As `scan_documents`, whose arguments are known to be right.

    Args:
        scan, rows, of_heads: as there.
        split: how ranks share documents.
        rank: this rank.
        exchange: between the ranks, where documents are cut.
    """
    of_whole = rows
    if split.whole_rows is not None:
        of_whole = {name: value.index_select(0, split.whole_rows) for name, value in rows.items()}
    results = [scan(of_whole, of_heads, split.whole)] if split.whole.lengths else []
    if split.is_moved:
        assert exchange is not None
        like = results[0] if results else None
        results.append(_of_cut_documents(scan, rows, of_heads, split, rank, exchange, like))
    if not results:  # a rank without rows
        like = _of_a_row(scan, rows, of_heads)
        return _nothing(rows, of_heads, like).reshape(0, *like.shape[1:])
    result = torch.cat(results)
    return result if split.whole_rows is None and not split.is_moved else result.index_select(0, split.place)


def _of_a_row(scan: Scan, rows: Mapping[str, torch.Tensor], of_heads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The results of a row of zeros: they tell the dtype, and the shape of a row."""
    zeros = {name: value.new_zeros(1, *value.shape[1:]) for name, value in rows.items()}
    device = next(iter(zeros.values())).device
    with torch.no_grad():
        return scan(zeros, of_heads, Documents([1], torch.tensor([0, 1], dtype=torch.int32, device=device)))


def _nothing(
    rows: Mapping[str, torch.Tensor], of_heads: Mapping[str, torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """No elements, of the dtype of `like`, in the graph of all tensors: ranks exchange gradients, and wrappers such as
    DDP wait for those of each parameter.
    """
    return torch.cat([value.flatten()[:0].to(like.dtype) for value in (*rows.values(), *of_heads.values())])


def _of_cut_documents(
    scan: Scan,
    rows: Mapping[str, torch.Tensor],
    of_heads: Mapping[str, torch.Tensor],
    split: HeadSplit,
    rank: int,
    exchange: RowExchange,
    like: torch.Tensor | None,
) -> torch.Tensor:
    """The results of this rank's rows of cut documents, each rank having computed some heads of all of them. `like` are
    results of other documents, if there are such.
    """
    num_ranks = len(split.num_come)
    num_heads = next(iter(rows.values())).shape[1]
    serves = {name: num_heads // value.shape[1] for name, value in rows.items()}
    of_ranks = [heads_of_rank(num_heads, to, num_ranks) for to in range(num_ranks)]

    leave = {name: value.index_select(0, split.leave) for name, value in rows.items()}
    parts = [[value[:, _served(heads, serves[name])] for name, value in leave.items()] for heads in of_ranks]
    mine = of_ranks[rank]
    shapes = [[(come, *part.shape[1:]) for part in parts[rank]] for come in split.num_come]
    came = exchange.move_parts(parts, shapes)
    here = {name: torch.cat(of_ranks).index_select(0, split.take) for name, *of_ranks in zip(leave, *came, strict=True)}
    if mine:
        here = {name: _evenly(value, mine, serves[name]) for name, value in here.items()}
        kept = {name: value[mine.start : mine.stop] for name, value in of_heads.items()}
        computed = scan(here, kept, split.cut)
    else:
        like = _of_a_row(scan, rows, of_heads) if like is None else like
        computed = _nothing(here, of_heads, like).reshape(len(split.take), 0, *like.shape[2:])
    back = computed.index_select(0, split.give).split(split.num_give)
    of_row = computed.shape[2:]
    own = split.num_give[rank]
    returned = exchange.move_parts([[part] for part in back], [[(own, len(heads), *of_row)] for heads in of_ranks])
    return torch.cat([part for (part,) in returned], dim=1)


def _served(heads: range, serves: int) -> slice:
    """Which heads of a tensor serve these, each of them several."""
    first = heads.start // serves
    return slice(first, -(-heads.stop // serves) if heads else first)


def _evenly(value: torch.Tensor, heads: range, serves: int) -> torch.Tensor:
    """The heads of a tensor that serve `heads`, such that all of them serve as many."""
    if value.shape[1] == 1 or (heads.start % serves == 0 and heads.stop % serves == 0):
        return value
    first = heads.start // serves
    return value.index_select(1, torch.tensor([head // serves - first for head in heads], device=value.device))
