"""Recurrent modules of transformers that compute each rank's rows where they lie.

Of such a module only a short convolution and a recurrence look along rows. Both are functions of the module's file:
they get the rows of a plan's documents here, and the rest of the module, its projections above all, runs as it does on
any packed row. The convolution's rows in front of a piece come from the rank that has them. The recurrence of a
document that is cut is computed by all ranks, each for some of the heads.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from dis import get_instructions
from typing import Any

import torch

from distca.connect.row_exchange import RowExchange
from distca.current import Current
from distca.errors import InvalidArgumentError
from distca.planner.halos import halos
from distca.planner.head_split import Documents, head_split
from distca.registry import find_context
from distca.scans import scan_split

#: Modules that nothing but the convolution makes look along rows.
_CONVOLUTIONS = frozenset({"Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"})
#: Those, and the modules that nothing but the convolution and one recurrence makes look along rows.
MODULES = _CONVOLUTIONS | frozenset(
    {
        "BailingHybridDeltaAttention",
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "JambaMambaMixer",
        "KimiLinearDeltaAttention",
        "LaraMiniGatedDeltaNet",
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
        packed_by: the keyword that tells a kernel where each document of a packed row begins (``cu_seqlens``), or which
            one each row belongs to (``seq_idx``), if there is such a kernel.
    """

    rows: tuple[str, ...]
    without_heads: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    is_rows_last: bool = False
    packed_by: str | None = None


_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = _Scan(("value", "query", "key", "g", "beta"), packed_by="cu_seqlens")
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Scan(("hidden_states", "dt", "B", "C"), of_heads=("A", "D", "dt_bias"), packed_by="seq_idx"),
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
        return exchange_of_rows(self.plan) if is_moved else None


_along: ContextVar[_Along | None] = ContextVar("distca.along", default=None)
# How many `along_documents` there are in all threads. Compiled code, which cannot ask for _along, guards on it.
_num_open = 0
_replacing = threading.Lock()


def exchange_of_rows(plan: Current) -> RowExchange:
    """The exchange between the ranks that have the plan's rows: all, or those of this rank's stage in a pipeline.

    Raises:
        InvalidArgumentError: there is no such context.
    """
    found = find_context(plan.context)
    if found is None:
        raise InvalidArgumentError(
            f"there is no context {plan.context!r}, over which documents that are cut get together"
        )
    return found.row_exchange(plan.ranks)


def functions_of(module: torch.nn.Module) -> frozenset[str]:
    """The functions by which a module looks along rows; none if it does so in other ways, too, or is not known.

    From then on these functions run along the documents of a plan inside of `along_documents`.
    """
    # A class that derives from one of these and has another forward may look along rows in other ways, too.
    kind = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    forward = inspect.unwrap(type(module).forward)
    if kind.__name__ not in MODULES or not isinstance(forward, types.FunctionType):
        return frozenset()
    used = {i.argval for i in get_instructions(forward) if i.opname == "LOAD_GLOBAL"}
    found = forward.__globals__
    names = used & {_CONVOLUTION, *_SCANS}
    # A version of transformers whose recurrence has another name is not known.
    expected = 1 if kind.__name__ in _CONVOLUTIONS else 2
    if _CONVOLUTION not in names or len(names) != expected or not all(callable(found.get(name)) for name in names):
        return frozenset()
    with _replacing:
        for name in names | used & {*_FUSED}:
            if not hasattr(found[name], "_distca_along"):
                found[name] = along_function(name, found[name])
    return frozenset(names)


def are_replaced(module: torch.nn.Module, functions: frozenset[str]) -> bool:
    """Whether others have replaced some of a module's functions since `functions_of` has found them."""
    found = inspect.unwrap(type(module).forward).__globals__
    return not all(hasattr(found.get(name), "_distca_along") for name in functions)


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


def along_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which inside of `along_documents` runs along documents, and elsewhere as always."""
    parameters = _parameters_of(original)
    packed_by = _SCANS[name].packed_by if name in _SCANS else None
    packed_by = packed_by if _packs(original, packed_by) else None

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _num_open:
            return original(*args, **kwargs)
        return _run(name, original, parameters, packed_by, args, kwargs)

    run.__dict__["_distca_along"] = True
    return run


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(
    name: str,
    original: Callable[..., Any],
    parameters: list[str],
    packed_by: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    along = _along.get()
    if along is None:
        return original(*args, **kwargs)
    if name in _FUSED:
        return None
    along.called.add(name)
    named = dict(zip(parameters, args, strict=False)) | kwargs

    def call(changed: dict[str, Any]) -> Any:
        """The function's result for these arguments, given by place where the module gives them so."""
        given = named | changed
        by_place = [given.pop(name) for name in parameters[: len(args)]]
        return original(*by_place, **given)

    if name == _CONVOLUTION:
        return _convolve(call, named, along)
    return _scan(_SCANS[name], call, named, along, None if _is_kernel_of_hub(original) else packed_by)


def _parameters_of(original: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters. The package kernels makes a module of it, with such a forward."""
    if not isinstance(original, torch.nn.Module):
        return list(inspect.signature(original).parameters)
    _, *parameters = inspect.signature(type(original).forward).parameters  # without self; a kernel has other names
    return parameters


def _is_kernel_of_hub(original: Callable[..., Any]) -> bool:
    """Whether the package kernels has replaced what the function does (``use_kernels=True``), which it may do later."""
    return isinstance(original, torch.nn.Module) and "forward" in vars(original)


def _packs(original: Callable[..., Any], keyword: str | None) -> bool:
    """Whether the function is a kernel that keeps the documents of a packed row apart, as transformers knows of it. Its
    own code does not.
    """
    if isinstance(original, torch.nn.Module):  # of the package kernels, around the function
        original = inspect.getclosurevars(type(original).forward).nonlocals.get("func", original)
    known = inspect.getclosurevars(original).nonlocals if isinstance(original, types.FunctionType) else {}
    return known.get("is_new_implementation") is True and keyword in known.get("applicable_params", ())


def _convolve(call: Callable[[dict[str, Any]], Any], named: dict[str, Any], along: _Along) -> torch.Tensor:
    layout, rank = along.plan.rows
    x = named["hidden_states"]  # [1, C, T]
    around = halos(layout, rank, named["weight"].shape[-1] - 1, x.device)
    padded = around.pad(x[0].T, along.exchange(around.is_moved))
    convolved: torch.Tensor = call({"hidden_states": padded.T[None]})
    return convolved[0].T.index_select(0, around.own).T[None]


def _scan(
    arguments: _Scan,
    call: Callable[[dict[str, Any]], Any],
    named: dict[str, Any],
    along: _Along,
    packed_by: str | None,
) -> Any:
    def by_rows(value: torch.Tensor) -> torch.Tensor:  # of [1, rows, ...] or [1, ..., rows]
        return value[0].movedim(-1, 0) if arguments.is_rows_last else value[0]

    def as_given(value: torch.Tensor) -> torch.Tensor:
        return (value.movedim(0, -1) if arguments.is_rows_last else value)[None]

    rows = {name: by_rows(named[name]) for name in arguments.rows if named.get(name) is not None}
    rows |= {name: by_rows(named[name])[:, None] for name in arguments.without_heads}  # as one head for all
    of_heads = {name: named[name] for name in arguments.of_heads if named.get(name) is not None}
    rest: list[Any] = []

    def run(rows: dict[str, torch.Tensor], others: dict[str, Any]) -> torch.Tensor:
        """The results of rows of one document, unless the others tell documents apart."""
        given = {name: value[:, 0] if name in arguments.without_heads else value for name, value in rows.items()}
        result = call({name: as_given(value) for name, value in given.items()} | others)
        if isinstance(result, tuple):  # with a state, which nobody asked for
            result, *rest[:] = result
        return by_rows(result)

    def scan(rows: Mapping[str, torch.Tensor], of_heads: Mapping[str, torch.Tensor], of: Documents) -> torch.Tensor:
        if packed_by is not None and len(of.lengths) > 1:
            told = of.cu_seqlens if packed_by == "cu_seqlens" else _numbers(of.cu_seqlens, sum(of.lengths))[None]
            return run(dict(rows), {**of_heads, packed_by: told})
        parts = zip(*(value.split(of.lengths) for value in rows.values()), strict=True)
        return torch.cat([run(dict(zip(rows, part, strict=True)), dict(of_heads)) for part in parts])

    layout, rank = along.plan.rows
    split = head_split(layout, rank, rows[arguments.rows[0]].device)
    result = as_given(scan_split(scan, rows, of_heads, split, rank, along.exchange(split.is_moved)))
    return (result, *rest) if rest else result


def _numbers(cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The number of each row's document: int32 ``[R]``."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], rows, right=True, out_int32=True)
