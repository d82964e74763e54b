"""RoPE with frequencies that depend on the longest position: `dynamic` and `longrope`.

transformers takes the longest position from the position_ids that it is given, which are this rank's. With a plan it is
the last position of the longest document of the plan's layout. That is the same on all ranks. It is also what one
process would take that has all documents in one packed row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from distca.current import current

_WHY = "the current plan has the longest position of the layout, on which RoPE frequencies depend"


def depends_on_longest(rope_type: object) -> bool:
    """Whether RoPE of this type (or of these, by layer type) takes its frequencies from the longest position."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def watch(model: torch.nn.Module) -> None:
    """Hooks the model's RoPE modules of these types. They then see the current plan's longest position, if any."""
    for module in model.modules():
        if depends_on_longest(getattr(module, "rope_type", None)) and not hasattr(module, "_distca_watched"):
            module.__dict__["_distca_watched"] = True
            module.register_forward_pre_hook(_append_longest, with_kwargs=True)
            module.register_forward_hook(_cut_longest)


@torch.compiler.disable(reason=_WHY)  # type: ignore[untyped-decorator]
def _append_longest(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Appends a column with the longest position to position_ids ``[..., T]``, if a plan is current."""
    here = current()
    if here is None:
        return None
    _forget_longest(module)
    given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = given.new_full((*given.shape[:-1], 1), here.longest_document - 1)
    positions = torch.cat([given, last], dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


@torch.compiler.disable(reason=_WHY)  # type: ignore[untyped-decorator]
def _cut_longest(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Cuts the appended column's row from cos and sin ``[..., T + 1, D]``."""
    return output if current() is None else tree_map(lambda rows: rows[..., :-1, :], output)


def _forget_longest(module: torch.nn.Module) -> None:
    """Restores the first frequencies of `dynamic`, which keeps those of the longest row, also of a local evaluation."""
    original = getattr(module, "original_max_seq_len", None)
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        prefix = name.removesuffix("max_seq_len_cached")
        prefix = "" if prefix == "None_" else prefix  # so older transformers write where layers are alike
        first = getattr(module, f"{prefix}original_inv_freq", None)
        if original is not None and first is not None and getattr(module, name) > original:
            buffer = getattr(module, f"{prefix}inv_freq")
            module.register_buffer(f"{prefix}inv_freq", first.to(buffer.device), persistent=False)
            setattr(module, name, original)
