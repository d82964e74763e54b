"""Modules that carry something from row to row other than by attention: linear attention, state spaces, convolutions.

A rank's documents lie in one packed row, and such a module would go on over their borders. With a plan it runs on each
document by itself: those that `hf_scans` knows compute every row where it lies, and others whole documents, whose rows
come together on one rank for that if they are cut between several.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from distca.connect.row_exchange import RowExchange
from distca.current import current
from distca.errors import InvalidArgumentError, refusals_told
from distca.integrations.hf_models import check_rows, refuse
from distca.integrations.hf_scans import along_documents, are_replaced, exchange_of_rows, functions_of
from distca.planner.gathering import Gathering, gathering
from distca.planner.pieces import whole_pieces
from distca.registry import find_context

#: Recurrent modules that nothing in them tells from attention.
_BY_NAME = ("MiniMaxLightningAttention",)
#: What the forward of a recurrent module calls its rows ``[1, T, ...]``. Decorators of transformers 5.13 to 5.15 hide
#: the names: such a forward has ``*args``.
_ROWS = ("hidden_states", "input_states", "args")
#: Keywords of transformers' collators that tell a packed row's documents, which a single document does not have.
_OF_PACKED_ROWS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

_run: ContextVar[set[torch.nn.Module] | None] = ContextVar("distca.recurrent", default=None)
_had_no_plan: ContextVar[bool] = ContextVar("distca.had_no_plan", default=False)


def looks_along_rows(module: torch.nn.Module) -> bool:
    """Whether the module is a convolution, a recurrence, a padding in front, which is a shift of rows, or RoPE that
    counts rows (ESM's before transformers 5.6).
    """
    if hasattr(module, "_update_cos_sin_tables"):
        return True
    if isinstance(module, torch.nn.Conv1d):
        return module.kernel_size != (1,)
    return isinstance(module, torch.nn.RNNBase | torch.nn.ZeroPad2d | torch.nn.ZeroPad1d | torch.nn.ConstantPad1d)


def is_recurrent(module: torch.nn.Module) -> bool:
    """Whether the module takes rows ``[1, T, ...]`` and looks along them other than by attention."""
    _, *parameters = inspect.signature(type(module).forward).parameters  # without self; an instance's may be replaced
    if isinstance(module, GradientCheckpointingLayer) or parameters[:1] not in [[name] for name in _ROWS]:
        return False  # a whole layer has attention and the rest of it, or another kind of rows
    return (
        "cache_params" in parameters
        or any(map(looks_along_rows, module.children()))
        or any(kind.__name__ in _BY_NAME for kind in type(module).__mro__)  # fully_shard makes a class of its own
    )


def run_by_document(module: torch.nn.Module, takes_plans: Callable[[], bool]) -> None:
    """Lets a recurrent module run on each document of the current plan by itself. Without a plan it runs as always, and
    so it does while its model takes none: the model's attn_implementation may change.
    """
    module.__dict__["_distca_functions"] = functions_of(module)
    if not hasattr(module, "_distca_by_document"):
        module.__dict__["_distca_by_document"] = True
        module.forward = functools.partial(_forward, module, takes_plans, module.forward)  # what others put there stays


def looks_by_functions(module: torch.nn.Module) -> bool:
    """Whether a recurrent module runs once on all rows of its rank, and not once for each document."""
    return bool(module.__dict__["_distca_functions"])


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _forward(
    module: torch.nn.Module, takes_plans: Callable[[], bool], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    here = current() if takes_plans() else None
    if here is None:
        refuse_recomputation(module)
        return forward(*args, **kwargs)
    ran = _run.get()
    if ran is not None:
        ran.add(module)
    module.__dict__["_distca_had_plan"] = True
    layout, rank = here.rows
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKED_ROWS}
    # A cache would hand the state of a document to the next one.
    leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_cache)
    leaves = [None if _is_cache(leaf) else leaf for leaf in leaves]
    rows = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    num_rows = rows.shape[1]
    with refusals_told(find_context(here.context)):
        check_rows(rows.shape[0], num_rows, layout.num_rows(rank), rank)
    functions: frozenset[str] = module.__dict__["_distca_functions"]
    # Functions that were replaced are noticed before a run in vain: activation checkpointing counts what such a run
    # saves, and finds less in backward.
    if functions and not are_replaced(module, functions):
        args, kwargs = tree_unflatten(leaves, spec)
        with along_documents(here) as called:
            result = forward(*args, **kwargs)
        if called == functions:
            return result
    if functions:  # others have replaced them, or the module's forward, on all ranks
        module.__dict__["_distca_functions"] = frozenset()
        refuse_units_inside(type(module).__name__, module)
    have_rows = [_has_rows(leaf, num_rows) for leaf in leaves]
    gathered = gathering(layout, rank, rows.device)
    if gathered is None:
        lengths = [end - begin for _, begin, end in whole_pieces(layout, rank)]
        outputs = _run_on_each(forward, leaves, have_rows, spec, lengths)
        return tree_map(functools.partial(_joined, lengths), *outputs)

    exchange = exchange_of_rows(here) if gathered.is_moved else None
    if exchange is not None:
        have_rows = _agreed(module, "arguments", leaves, have_rows, gathered, exchange)
    leaves = [
        gathered.gather(leaf[0], exchange)[None] if of_rows else leaf
        for leaf, of_rows in zip(leaves, have_rows, strict=True)
    ]
    outputs = [tree_flatten(one) for one in _run_on_each(forward, leaves, have_rows, spec, gathered.lengths)]
    of_leaves = [*zip(*(of_document for of_document, _ in outputs), strict=True)]
    have_rows = [all(map(_has_rows, of_documents, gathered.lengths)) for of_documents in of_leaves]
    last, spec = outputs[-1]
    if exchange is not None:
        have_rows = _agreed(module, "result", last, have_rows, gathered, exchange)
    leaves = [
        gathered.scatter(torch.cat(of_documents, dim=1)[0], exchange)[None] if of_rows else of_documents[-1]
        for of_documents, of_rows in zip(of_leaves, have_rows, strict=True)
    ]
    return tree_unflatten(leaves, spec)


def _run_on_each(
    forward: Callable[..., Any], leaves: list[Any], have_rows: list[bool], spec: TreeSpec, lengths: list[int]
) -> list[Any]:
    """What the module returns for each document, whose rows lie one after another in those arguments that have rows."""
    outputs, begin = [], 0
    for length in lengths:
        of_document = [
            leaf[:, begin : begin + length] if of_rows else leaf
            for leaf, of_rows in zip(leaves, have_rows, strict=True)
        ]
        args, kwargs = tree_unflatten(of_document, spec)
        outputs.append(forward(*args, **kwargs))
        begin += length
    return outputs


def _agreed(
    module: torch.nn.Module,
    what: str,
    leaves: list[Any],
    mine: list[bool],
    gathered: Gathering,
    exchange: RowExchange,
) -> list[bool]:
    """Which of the leaves have rows on all ranks, as these tell each other in the first call with such leaves. To one
    rank something else may look like rows, such as a state of as many heads as its document has rows.
    """
    known: dict[Any, list[bool]] = module.__dict__.setdefault("_distca_have_rows", {})
    kinds = what, *((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    if kinds not in known:
        each = [1] * len(gathered.num_come)
        told = torch.tensor([mine for _ in each], dtype=torch.bool, device=gathered.take.device)
        known[kinds] = exchange.move(told, each, each).all(dim=0).tolist()
    return known[kinds]


def _is_cache(value: object) -> bool:
    """Whether the value is a cache. Before transformers 5.15 some models have caches that derive from nothing."""
    return isinstance(value, Cache) or type(value).__name__.endswith("Cache")


def _has_rows(value: Any, num_rows: int) -> bool:
    """Whether the value is a tensor ``[1, T, ...]`` of that many rows."""
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, num_rows)


def _joined(lengths: list[int], *of_documents: Any) -> Any:
    """The rows of all documents, one after another. What has no rows is that of the last document."""
    if all(_has_rows(one, length) for one, length in zip(of_documents, lengths, strict=True)):
        return torch.cat(of_documents, dim=1)
    return of_documents[-1]


def refuse_recomputation(module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError if a module that ran with a plan runs again in backward without one."""
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and not _had_no_plan.get() and getattr(module, "_distca_had_plan", False):
        raise InvalidArgumentError(
            'attn_implementation="distca": a layer runs again in backward (activation checkpointing), where its plan '
            "is not known: use model.gradient_checkpointing_enable(), or checkpoint a function that enters "
            "distca.using(plan) itself"
        )


@contextmanager
def had_no_plan() -> Iterator[None]:
    """Inside, layers may run again in backward without a plan, because their forward had none."""
    before = _had_no_plan.set(True)
    try:
        yield
    finally:
        _had_no_plan.reset(before)


def refuse_units_inside(name: str, module: torch.nn.Module) -> None:
    """Raises InvalidArgumentError if something inside of a module that runs once for each document gathers its weights
    whenever it runs: ranks have different numbers of documents.
    """
    for path, part in module.named_modules():
        how, instead = _gathered_by(part) if part is not module else (None, "")
        refuse(
            how is not None,
            f"the model's module {name}.{path} is {how} inside of a module that runs once for each document, and ranks "
            f"have different numbers of documents: their collectives would not match. {instead}",
        )


def _gathered_by(module: torch.nn.Module) -> tuple[str | None, str]:
    """What gathers the module's weights whenever it runs, None if nothing does; and what to do where it may not."""
    if isinstance(module, FSDPModule | FullyShardedDataParallel):
        return "a unit of FSDP", "Shard whole layers"
    if hasattr(module, "ds_id") and next(module.parameters(recurse=False), None) is not None:  # as DeepSpeed marks it
        return "gathered by DeepSpeed's ZeRO-3", (
            "Gather whole layers, by deepspeed.utils.set_z3_leaf_modules(model, [the class of the layers]) before "
            "deepspeed.initialize, or use ZeRO-2"
        )
    return None, ""


@contextmanager
def ran_by_document() -> Iterator[set[torch.nn.Module]]:
    """Yields the recurrent modules that have run on each document by itself, inside and so far."""
    ran: set[torch.nn.Module] = set()
    before = _run.set(ran)
    try:
        yield ran
    finally:
        _run.reset(before)
