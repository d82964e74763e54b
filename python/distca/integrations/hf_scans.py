"""Recurrent modules of transformers that compute each rank's rows where they lie.

Of such a module only a short convolution and a recurrence look along rows. Both are functions of the module's file:
they get the rows of a plan's documents here, and the rest of the module, its projections above all, runs as it does on
any packed row. The convolution's rows in front of a piece come from the rank that has them. The recurrence of a
document that is cut is computed by all ranks, each for some of the heads.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from dis import get_instructions
from typing import Any

import torch

from distca.connect.row_exchange import RowExchange
from distca.context import Context
from distca.current import Current
from distca.errors import InvalidArgumentError
from distca.planner.halos import halos
from distca.planner.head_split import HeadSplit, head_split, heads_of_rank
from distca.registry import find_context

#: The modules, which nothing but such functions makes look along rows.
MODULES = frozenset(
    {
        "BailingHybridDeltaAttention",
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "JambaMambaMixer",
        "KimiLinearDeltaAttention",
        "LaraMiniGatedDeltaNet",
        "Lfm2MoeShortConv",
        "Lfm2ShortConv",
        "Lfm3ShortConv",
        "NemotronHMamba2Mixer",
        "OlmoHybridGatedDeltaNet",
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Zamba2MambaMixer",
        "ZambaMambaMixer",
    }
)


@dataclass(frozen=True)
class _Scan:
    """The arguments of a recurrence, by their names.

    Attributes:
        rows: those with rows and heads. The first has as many heads as the result; others may have fewer, each of which
            serves several.
        without_heads: those with rows alone.
        of_heads: those with a value, or some, for each head.
        is_rows_last: whether they are ``[1, heads, rows]`` and not ``[1, rows, heads, ...]``.
    """

    rows: tuple[str, ...]
    without_heads: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    is_rows_last: bool = False


_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = _Scan(("value", "query", "key", "g", "beta"))
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Scan(("hidden_states", "dt", "B", "C"), of_heads=("A", "D", "dt_bias")),
    "mamba_selective_scan": _Scan(
        ("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "delta_bias"), is_rows_last=True
    ),
}
#: What does all at once, where it can, and returns None where it cannot.
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")


@dataclass
class _Along:
    """The documents that functions run along now.

    Attributes:
        plan: the current plan.
        called: the functions that were called.
    """

    plan: Current
    called: set[str] = field(default_factory=set)

    def exchange(self, is_moved: bool) -> RowExchange | None:
        """Between the ranks of the plan's context; None where no rows move."""
        return exchange_in(self.plan.context) if is_moved else None


_along: ContextVar[_Along | None] = ContextVar("distca.along", default=None)
_num_open = (
    0  # how many `along_documents` there are in all threads: compiled code, which cannot ask for _along, guards on it
)


def exchange_in(context: Context | str) -> RowExchange:
    """The exchange of rows of a context.

    Raises:
        InvalidArgumentError: there is no such context.
    """
    found = find_context(context)
    if found is None:
        raise InvalidArgumentError(f"there is no context {context!r}, over which documents that are cut get together")
    return found.row_exchange()


def functions_of(module: torch.nn.Module) -> frozenset[str]:
    """The functions by which a module looks along rows; none if it does so in other ways, too, or is not known.

    From then on these functions run along the documents of a plan inside of `along_documents`.
    """
    kind = next((kind for kind in type(module).__mro__ if kind.__name__ in MODULES), None)
    if kind is None:
        return frozenset()
    forward = inspect.unwrap(vars(kind)["forward"])
    if not isinstance(forward, types.FunctionType):
        return frozenset()
    used = {i.argval for i in get_instructions(forward) if i.opname == "LOAD_GLOBAL"}
    found = forward.__globals__
    names = used & {_CONVOLUTION, *_SCANS}
    if _CONVOLUTION not in names or not all(callable(found.get(name)) for name in names):
        return frozenset()
    for name in names | used & {*_FUSED}:
        if not hasattr(found[name], "_distca_along"):
            found[name] = _along_documents(name, found[name])
    return frozenset(names)


@contextmanager
def along_documents(plan: Current) -> Iterator[set[str]]:
    """Inside, the functions run along the plan's documents. Yields the names of those that were called so far."""
    global _num_open
    along = _Along(plan)
    before = _along.set(along)
    _num_open += 1
    try:
        yield along.called
    finally:
        _num_open -= 1
        _along.reset(before)


def _along_documents(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which inside of `along_documents` runs along documents, and elsewhere as always."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run(name, original, args, kwargs) if _num_open else original(*args, **kwargs)

    run.__dict__["_distca_along"] = True
    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    along = _along.get()
    if along is None:
        return original(*args, **kwargs)
    if name in _FUSED:
        return None
    along.called.add(name)
    parameters = list(inspect.signature(original).parameters)
    named = dict(zip(parameters, args, strict=False)) | kwargs

    def call(changed: dict[str, Any]) -> Any:
        """The function's result for these arguments, given by place where the module gives them so."""
        by_place = [changed.get(name, value) for name, value in zip(parameters, args, strict=False)]
        return original(*by_place, **{name: changed.get(name, value) for name, value in kwargs.items()})

    along_all = _convolve if name == _CONVOLUTION else functools.partial(_scan, _SCANS[name])
    return along_all(call, named, along)


def _convolve(call: Callable[[dict[str, Any]], Any], named: dict[str, Any], along: _Along) -> torch.Tensor:
    layout, rank = along.plan.rows
    x = named["hidden_states"]  # [1, C, T]
    around = halos(layout, rank, named["weight"].shape[-1] - 1, x.device)
    padded = around.pad(x[0].T, along.exchange(around.is_moved))
    convolved: torch.Tensor = call({"hidden_states": padded.T[None]})
    return convolved[0].T.index_select(0, around.own).T[None]


def _scan(scan: _Scan, call: Callable[[dict[str, Any]], Any], named: dict[str, Any], along: _Along) -> Any:
    layout, rank = along.plan.rows
    given = {name: named[name] for name in (*scan.rows, *scan.without_heads) if named.get(name) is not None}
    rows = {name: value[0].movedim(-1, 0) if scan.is_rows_last else value[0] for name, value in given.items()}
    of_heads = {name: named[name] for name in scan.of_heads if named.get(name) is not None}
    main = rows[scan.rows[0]]
    split = head_split(layout, rank, main.device)
    rest: list[Any] = []

    def run(rows: dict[str, torch.Tensor], of_heads: dict[str, torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
        """The results of documents, whose rows lie one after another."""
        results, begin = [], 0
        for length in lengths:
            part = {name: value[begin : begin + length] for name, value in rows.items()}
            if scan.is_rows_last:
                part = {name: value.movedim(0, -1) for name, value in part.items()}
            result = call({name: value[None] for name, value in part.items()} | of_heads)
            if isinstance(result, tuple):  # with a state, which nobody asked for
                result, *rest[:] = result
            results.append(result[0].movedim(-1, 0) if scan.is_rows_last else result[0])
            begin += length
        return results

    of_whole = rows
    if split.whole is not None:
        of_whole = {name: value.index_select(0, split.whole) for name, value in rows.items()}
    results = run(of_whole, of_heads, split.lengths)
    if split.is_moved:
        results += _of_cut_documents(scan, run, rows, of_heads, split, rank, along, results)
    result = torch.cat(results)
    if split.whole is not None or split.is_moved:
        result = result.index_select(0, split.place)
    result = result.movedim(0, -1)[None] if scan.is_rows_last else result[None]
    return (result, *rest) if rest else result


def _of_cut_documents(
    scan: _Scan,
    run: Callable[..., list[torch.Tensor]],
    rows: dict[str, torch.Tensor],
    of_heads: dict[str, torch.Tensor],
    split: HeadSplit,
    rank: int,
    along: _Along,
    results: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The results of this rank's rows of cut documents, each rank having computed some heads of all of them."""
    exchange = along.exchange(True)
    assert exchange is not None
    main = scan.rows[0]
    num_heads, num_ranks = rows[main].shape[1], len(split.num_come)
    ranges = [heads_of_rank(num_heads, to, num_ranks) for to in range(num_ranks)]

    def shared(name: str, heads: range) -> slice:
        """Which heads of an argument these heads need."""
        if name in scan.without_heads:
            return slice(None)
        serves = num_heads // rows[name].shape[1]
        return slice(heads.start // serves, -(-heads.stop // serves) if heads else heads.start // serves)

    leave = {name: value.index_select(0, split.leave) for name, value in rows.items()}
    parts = [[value[:, shared(name, heads)] for name, value in leave.items()] for heads in ranges]
    mine = ranges[rank]
    shapes = [[(come, *part.shape[1:]) for part in parts[rank]] for come in split.num_come]
    came = exchange.move_parts(parts, shapes)
    here = {name: torch.cat(of_ranks).index_select(0, split.take) for name, *of_ranks in zip(leave, *came, strict=True)}
    if mine:
        for name in scan.rows:
            if name in here:
                here[name] = _as_served(here[name], mine, num_heads // rows[name].shape[1])
        kept = {name: value[mine.start : mine.stop] for name, value in of_heads.items()}
        computed = torch.cat(run(here, kept, split.cut_lengths))
    else:
        with torch.no_grad():  # what the dtype of results is
            like = results[0] if results else run({n: v[:1] for n, v in rows.items()}, of_heads, [1])[0]
        computed = here[main].to(like.dtype)  # no heads; in its graph, because all ranks exchange gradients
    back = computed.index_select(0, split.give).split(split.num_give)
    of_row = computed.shape[2:]
    own = split.num_give[rank]
    returned = exchange.move_parts([[part] for part in back], [[(own, len(heads), *of_row)] for heads in ranges])
    return [torch.cat([part for (part,) in returned], dim=1)]


def _as_served(value: torch.Tensor, heads: range, serves: int) -> torch.Tensor:
    """Heads of an argument, each of which serves several of `heads`, such that all serve as many."""
    if value.shape[1] == 1 or (heads.start % serves == 0 and heads.stop % serves == 0):
        return value
    first = heads.start // serves
    return value.index_select(1, torch.tensor([head // serves - first for head in heads], device=value.device))
