"""Making plans and stating their memory: `distca.plan`, `distca.plans`, `distca.memory_report`.

None of these needs a process group or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from distca.arguments import check_type, is_number, is_whole, listed
from distca.errors import InvalidArgumentError
from distca.heads import DTYPE_NUMBERS, Heads, LayerHeads, shapes_of
from distca.planner.cost import CostModel
from distca.planner.layout import Chunk, Layout, Window
from distca.planner.memory import MemoryReport, report
from distca.planner.plan import Plan, Plans, is_bound_by_capacity
from distca.planner.scores import MASKS, Scores, numbered
from distca.registry import find_context, if_closed

if TYPE_CHECKING:
    from distca.context import Context

#: The most bytes that a rank may retain, or get in a round; no limit in practice.
_MOST_BYTES = 2**46
#: Bytes of a round by default: some 20 microseconds of a link between hosts.
_ROUND_BYTES = 2**20


def plan(
    layout: Layout,
    heads: Heads,
    *,
    context: Context | str | None = None,
    rank: int | None = None,
    mask: str = "causal",
    window: int | None = None,
    scores: Sequence[Scores] | None = None,
    servers: Sequence[int] | None = None,
    speeds: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    tolerance: float = 0.05,
    balance: bool = True,
    split_heads: bool = True,
    min_rows: int = 128,
    objective: str = "all",
    overlap: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    round_bytes: int | None = None,
    retain_bytes: int | Sequence[int] = 0,
    capacity: int | None = None,
    cost: CostModel | None = None,
    tasks: Sequence[tuple[int, int, int, int, int, int]] | None = None,
    label: str = "",
) -> Plan:
    """Cuts core attention of a layout into tasks and gives every server the same load (paper, section 4.2).

    A plan is a pure function of the arguments. It is the same on every rank to the last bit; therefore nobody needs to
    send it. No context is read unless it is given.

    Args:
        layout: the rows of every rank.
        heads: head shape and dtype of the layers that will use the plan.
        context: the context that will run the plan, or its name. It must have as many ranks as the layout. It gives the
            defaults of `rank`, `capacity` and `cost`.
        rank: the rank whose slice ``Plan.tensor`` is; by default the context's, or 0 without a context.
        mask: ``"causal"``, or ``"full"``: every row of a document sees all of it, or what the window leaves.
        window: a row sees keys that are less than ``window`` rows away: its own, the ``window - 1`` before it and,
            with the full mask, the ``window - 1`` after it (ModernBERT, EmbeddingGemma).
        scores: for each document its mask, window, scale and softcap, in place of `mask` and `window`; at most 32
            different ones. Documents of different layers can then share a step, as in the ticks of a pipeline. All
            documents have a scale or none, and so with the softcap.
        servers: the ranks that compute tasks; by default all (in-place servers).
        speeds: the speed of each rank, an integer from 1 to 2**20 in units of your choice. A rank's load is compared
            with its share of their sum. By default all are equal.
        ranks_per_node: how many neighbouring ranks are one node. Bytes between nodes are avoided first. By default all
            ranks are one node.
        tolerance: how far the *largest* load may be above the mean, as a fraction of it, 0 to 1.
        balance: False computes every row at home. Remote keys of split documents are still fetched.
        split_heads: whether ranges of a document's key/value heads may go to different servers. This often moves fewer
            bytes than rows do. Where more than 64 documents share rows, directly or over others, heads stay together.
        min_rows: the fewest rows of a piece that is cut off a document. Smaller pieces are cut only if the tolerance
            cannot be met otherwise.
        objective: the messages whose bytes are kept few: ``"all"`` four, or those of the ``"forward"`` pass.
        overlap: True sends gradients home from all servers at once, as far as the capacity allows, so that they travel
            while ranks compute. This is for ping-pong. By default they come home in rounds: a round has as many
            messages as fit into the bytes that the neediest rank's arena takes anyway, and only the first round
            overlaps with other work.
        reduce_dtype: the dtype in which contributions to a key's gradients travel home where several servers have
            some: ``torch.float32``, or that of `heads`, with which they are half the bytes and take half the memory.
            They are added in fp32 in any case. In the dtype of `heads` each is rounded before, as the sum is after it;
            in fp16 one may overflow where the sum does not. out, log-sum-exp and dq have the same bits. Where documents
            share rows, a server may have several contributions; it adds them up, and sends their sum in fp32, where
            that has no more bytes.
        round_bytes: rows go to a server in up to three rounds of about the same attention, as many as leave each so
            many bytes on average in forward. A server computes the tasks of one round while the rows of the next
            travel, and sends results home meanwhile. What it computes of a document, or of a range of its heads, is in
            one round. By default 2**20; with ``overlap=True`` all rows are in one round.
        retain_bytes: bytes of keys and values that each rank, as a server, may retain from a step's forward to its
            backward, so that they are not sent again: one number for all ranks, or one for each. Every call of
            `core_attention` retains up to as much until its backward has run; multiply it by the layers. The documents
            that save most bytes are retained, and none that share rows. Results have the same bits. By default nothing
            is retained.
        capacity: bytes of one slot's arena. No plan needs more, even if the tolerance is then missed. By default the
            context's, or unlimited without a context. The first plan of a context that misses the tolerance by far
            because of the context's capacity is a warning of the logger ``distca``.
        cost: the cost model that is balanced; by default the context's, or visible pairs without a context.
        tasks: a schedule of your own in place of the scheduler's: for each task ``(document, q_begin, q_end,
            kv_head_begin, kv_head_end, server)``, in any order. ``balance``, ``tolerance`` and ``min_rows`` then have
            no effect.
        label: what the plan is for, up to 48 characters of printable ASCII. It is in the digest and in messages. A plan
            with a label may have a ``plan_backward`` with a label in which *other* ranks hold other rows, as in the
            ticks of a pipeline (`distca.pipeline`).

    Returns:
        The plan, seen from `rank`.

    Raises:
        InvalidArgumentError: an argument is out of range, the context is not open or has another number of ranks, or
            ``tasks`` do not compute every row and head exactly once.
        CapacityError: not even rows computed at home fit, or the given tasks do not. The message says the bytes needed.

    Examples:
        >>> layout = distca.Layout.from_documents([[1900], [700, 70, 1, 500, 129, 500]])
        >>> made = distca.plan(layout, distca.Heads(q=8, kv=2, dim=64), tolerance=0.01)
        >>> round(made.stats.imbalance_before, 2)  # largest load over the mean, every row computed at home
        1.56
        >>> made.stats.imbalance_after <= 1.01
        True
        >>> sum(task.server != task.home for task in made.tasks) > 0  # some are computed elsewhere
        True
    """
    check_type("plan", "layout", layout, Layout, "distca.Layout.from_documents([[100, 20], [80]])")
    if isinstance(heads, Mapping):
        raise InvalidArgumentError(
            f"plan: heads are a mapping from {[*heads]}; a plan has one head shape: distca.plans makes a plan for each"
        )
    check_type("plan", "heads", heads, Heads, "distca.Heads(q=8, kv=2, dim=64)")
    here = None if context is None else _context_of(layout, context)
    if rank is None:
        rank = 0 if here is None else here.rank
    if not is_whole(rank, 0, layout.num_ranks - 1):
        raise InvalidArgumentError(f"plan: rank = {rank!r}; 0 to {layout.num_ranks - 1} are allowed")
    if isinstance(window, Chunk):
        raise InvalidArgumentError(
            f"plan: window = {window}; distca.plans(layout, heads, windows=[{window}]) plans chunks"
        )
    if scores is None:
        different, of_documents = [Scores(mask, window)], list[int]()
        different[0].check("plan")
    elif (mask, window) != ("causal", None):
        raise InvalidArgumentError("plan: scores are given, and mask or window as well; scores have both")
    else:
        different, of_documents = numbered("plan", scores, len(layout.document_lengths))
    if servers is not None:
        servers = listed("plan", "servers", servers, "a list of ranks, or None for all,")
        if not servers:
            raise InvalidArgumentError("plan: servers is empty; None stands for all ranks")
        if not all(is_whole(server, 0, layout.num_ranks - 1) for server in servers):
            raise InvalidArgumentError(f"plan: servers = {servers}; ranks from 0 to {layout.num_ranks - 1} are allowed")
    if speeds is not None:
        speeds = listed("plan", "speeds", speeds, "one integer for each rank, or None for the same of all,")
        if not all(is_whole(speed, 1, 2**20) for speed in speeds):
            raise InvalidArgumentError(f"plan: speeds = {speeds}; integers from 1 to {2**20} are allowed")
    if ranks_per_node is not None and not is_whole(ranks_per_node, 1):
        raise InvalidArgumentError(f"plan: ranks_per_node = {ranks_per_node!r}; None or 1 to 2**62 is allowed")
    if objective not in ("all", "forward"):
        raise InvalidArgumentError(f"plan: objective = {objective!r}; 'all' and 'forward' are allowed")
    if not is_number(tolerance, 0.0, 1.0):
        raise InvalidArgumentError(f"plan: tolerance = {tolerance!r}; 0 to 1 is allowed")
    if not is_whole(min_rows, 1):
        raise InvalidArgumentError(f"plan: min_rows = {min_rows!r}; an integer from 1 to 2**62 is allowed")
    if tasks is not None:
        tasks = listed("plan", "tasks", tasks, "a list of tasks, or None for ours,")
        for task in tasks:
            numbers = listed("plan", "a task", task, "(document, q_begin, q_end, kv_head_begin, kv_head_end, server)")
            if len(numbers) != 6 or not all(is_whole(number, -_MOST_BYTES) for number in numbers):
                raise InvalidArgumentError(
                    f"plan: a task is {task!r}; six integers (document, q_begin, q_end, kv_head_begin, kv_head_end, "
                    "server) are expected"
                )
    if not isinstance(label, str) or len(label) > 48 or not (label.isascii() and label.isprintable()):
        raise InvalidArgumentError(
            f"plan: label = {label!r}; a text of up to 48 characters of printable ASCII is expected"
        )
    if reduce_dtype not in (torch.float32, heads.dtype):
        raise InvalidArgumentError(
            f"plan: reduce_dtype = {reduce_dtype!r}; torch.float32 or the dtype of the heads, {heads.dtype}, is allowed"
        )
    if round_bytes is None:
        round_bytes = _MOST_BYTES if overlap else _ROUND_BYTES
    if not is_whole(round_bytes, 1, _MOST_BYTES):
        raise InvalidArgumentError(f"plan: round_bytes = {round_bytes!r}; None or 1 to 2**46 is allowed")
    retain = _retain_bytes(retain_bytes, layout.num_ranks)
    keeps_to_heap = capacity is None and here is not None
    if capacity is None:
        capacity = 2**62 if here is None else here.slot_bytes
    if not is_whole(capacity, 1):
        raise InvalidArgumentError(f"plan: capacity = {capacity!r} bytes; 1 to 2**62 are allowed")
    if cost is None:
        cost = CostModel() if here is None else here.cost
    check_type("plan", "cost", cost, CostModel, 'distca.CostModel.load("pairs")')
    arguments = {
        "cost": cost,
        "tolerance_ppm": round(float(tolerance) * 1e6),
        "min_rows": min_rows,
        "balance": bool(balance),
        "capacity": capacity,
        "scores": [(MASKS.index(one.mask), one.window or 0, one.scale, one.softcap) for one in different],
        "scores_of_document": of_documents,
        "servers": [] if servers is None else sorted(set(map(index, servers))),
        "speeds": [] if speeds is None else list(map(index, speeds)),
        "ranks_per_node": ranks_per_node or 0,
        "forward_only": objective == "forward",
        "overlap": bool(overlap),
        "reduce_dtype": DTYPE_NUMBERS[reduce_dtype],
        "round_bytes": index(round_bytes),
        "retain_bytes": retain,
        "split_heads": bool(split_heads),
        "label": label,
    }
    given = None if tasks is None else [tuple(map(index, task)) for task in tasks]
    made = Plan(layout, heads, arguments, index(rank), tasks=given)
    if here is not None and keeps_to_heap and not here.short_heap_is_noted and is_bound_by_capacity(made):
        here.note_short_heap(made.stats, float(tolerance))
    return made


def _context_of(layout: Layout, context: Context | str) -> Context:
    """The open context that will run plans of that layout."""
    here = find_context(context)
    if here is None:
        closed = if_closed(str(context))
        raise InvalidArgumentError(f"plan: there is no context {context!r}; distca.init makes one{closed}")
    if here.num_ranks != layout.num_ranks:
        raise InvalidArgumentError(
            f"plan: the layout is of {layout.num_ranks} ranks, context {here.name!r} of {here.num_ranks}; give a "
            "layout of its ranks, or no context"
        )
    return here


def _retain_bytes(asked: int | Sequence[int], num_ranks: int) -> list[int]:
    """The bytes that each rank may retain."""
    try:
        of_ranks = [index(n) for n in asked] if isinstance(asked, Sequence) else [index(asked)] * num_ranks
    except TypeError:
        of_ranks = [-1]
    if len(of_ranks) != num_ranks or not all(0 <= n <= _MOST_BYTES for n in of_ranks):
        raise InvalidArgumentError(
            f"plan: retain_bytes = {asked!r}; a number of bytes from 0 to 2**46 is allowed, or one for each of "
            f"{num_ranks} ranks"
        )
    return of_ranks


def plans(
    layout: Layout,
    heads: LayerHeads,
    *,
    windows: Iterable[Window],
    bidirectional_windows: Iterable[Window] | None = None,
    **options: Any,
) -> Plans:
    """One plan for each window, for a model whose layers differ in their window (Gemma, gpt-oss, Llama 4).

    Args:
        layout: as in `plan`.
        heads: head shape and dtype of all layers. Where layers of another window have other heads (Gemma 4, MiMo V2
            Flash), a mapping from each window to its heads.
        windows: the layers' windows; None for layers that see their whole document, `Chunk` for attention in chunks.
        bidirectional_windows: the windows of the layers in which the layout's bidirectional rows see those after them;
            by default all. In Gemma 4 only layers with a sliding window do so.
        options: the other arguments of `plan`.

    Returns:
        The plans by window.

    Raises:
        DistcaError: as in `plan`.
        InvalidArgumentError: there is no window, or one without heads.

    Examples:
        >>> layout = distca.Layout.from_documents([[500], [100, 80]])
        >>> heads = {None: distca.Heads(q=4, kv=1, dim=128), 64: distca.Heads(q=4, kv=2, dim=64)}
        >>> made = distca.plans(layout, heads, windows=[64, 64, None])
        >>> {window: plan.heads.dim for window, plan in made.items()}
        {64: 64, None: 128}
    """
    shapes_of("plans", heads)
    check_type("plans", "layout", layout, Layout, "distca.Layout.from_documents([[100, 20], [80]])")

    def made(window: Window) -> Plan:
        rows = layout if bidirectional is None or window in bidirectional else layout.with_bidirectional({})
        of_window = heads[window] if isinstance(heads, Mapping) else heads
        if not isinstance(window, Chunk):
            return plan(rows, of_window, window=window, **options)
        if options.get("mask", "causal") != "causal":
            raise InvalidArgumentError(
                f"plans: mask = {options['mask']!r} with {window}; the rows of a chunk see it up to themselves"
            )
        of_chunks = plan(rows.chunked(window.rows), of_window, **options)
        of_chunks.whole = layout
        return of_chunks

    expected = "a list of windows, of which None stands for none,"
    given = listed("plans", "windows", windows, expected)
    bidirectional = None
    if bidirectional_windows is not None:
        bidirectional = listed("plans", "bidirectional_windows", bidirectional_windows, expected)
    for window in [*given, *(bidirectional or ())]:
        if not (window is None or isinstance(window, Chunk) or is_whole(window, 1)):
            raise InvalidArgumentError(
                f"plans: a window is {window!r}; None, a number of rows or a distca.Chunk is allowed"
            )
    if isinstance(heads, Mapping) and (others := [window for window in given if window not in heads]):
        raise InvalidArgumentError(
            f"plans: heads are given for the windows {[*heads]}, and there are layers of the windows {others}"
        )
    if bidirectional is not None and (others := [window for window in bidirectional if window not in given]):
        raise InvalidArgumentError(f"plans: bidirectional_windows has {others}, which are none of the windows {given}")
    if "window" in options:
        raise InvalidArgumentError("plans: window and windows are given; name all of them in windows")
    exact = bidirectional is not None and layout._core.has_bidirectional
    return Plans({window: made(window) for window in dict.fromkeys(given)}, exact=exact)


def memory_report(*plans: Plan, context: Context | str | None = None, layers: int = 1) -> MemoryReport:
    """States the bytes that these plans take on every rank. Nothing runs.

    Args:
        plans: plans of one or several layouts of the same ranks, for example one for each batch.
        context: the context that will run them, or its name; by default the default context, if there is one.
        layers: how many calls of `core_attention` retain keys at the same time: the number of layers of a model.

    Returns:
        The report. Printed, it is a table.

    Raises:
        InvalidArgumentError: there is no plan or no layer, the plans differ in their number of ranks, or the context is
            not open or has another number of ranks.

    Examples:
        >>> made = distca.plan(distca.Layout.from_documents([[400], [60, 20]]), distca.Heads(q=8, kv=2, dim=64))
        >>> distca.memory_report(made).heap_bytes == 2 * made.stats.slot_bytes  # without a context
        True
    """
    for plan in plans:
        check_type("memory_report", "a plan", plan, Plan, "distca.plan(layout, heads)")
    return report([plan.stats for plan in plans], context=context, layers=layers)
