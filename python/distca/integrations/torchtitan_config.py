"""What a plan needs from the configuration of a model of torchtitan, and all names from inside of torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions
from typing import Any, NoReturn

import torch

from distca.errors import InvalidArgumentError
from distca.heads import Heads

try:
    from spmd_types import is_type_checking as is_type_checking
    from torchtitan.config.override import derive as derive
    from torchtitan.config.override import override as override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC as SelectiveAC
    from torchtitan.models.common.attention import VarlenAttention as VarlenAttention
    from torchtitan.models.gpt_oss.model import Attention

    WITH_SINKS = Attention._apply_sinks  # what gpt-oss gives its attention as out_transform
except (ImportError, AttributeError) as error:
    _installed = next((found.version for found in distributions(name="torchtitan")), "none")
    raise ImportError(
        "distca's integration of torchtitan is written for version 0.3.0 with what it requires; installed is "
        f"{_installed}: {error}"
    ) from error


def heads_of(config: Any, dtype: torch.dtype = torch.bfloat16) -> Heads:
    """The heads of a model's attention layers, for `distca.init` and `distca.plan`.

    Args:
        config: the model's configuration, before or after the override.
        dtype: what attention is computed in. torchtitan's own varlen attention always computes in bfloat16.

    Raises:
        InvalidArgumentError: the layers differ in their heads, or a plan cannot compute one of them.
    """
    found = {}
    for name, attention in attention_layers(config):
        kv, dim = getattr(attention, "n_kv_heads", None) or attention.n_heads, getattr(attention, "head_dim", None)
        if hasattr(attention, "kv_lora_rank"):  # multi-head latent attention
            dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        dim = dim or attention.dim // attention.n_heads
        found[Heads(attention.n_heads, kv, dim, getattr(attention, "v_head_dim", dim), dtype)] = name
    if len(found) != 1:
        refuse(f"layers differ in their heads: {found}")
    return next(iter(found))


def windows_of(config: Any) -> list[int | None]:
    """The windows of a model's attention layers, for `distca.plans`. torchtitan's (W, 0) is a window of W + 1 rows."""
    return [window_of(attention.inner_attention) for _, attention in attention_layers(config)]


def attention_layers(config: Any) -> Iterator[tuple[str, Any]]:
    """Name and configuration of every attention layer of a decoder. Raises if a plan cannot compute one of them."""
    model = type(config).__qualname__.removesuffix(".Config")
    if not getattr(config, "layers", None):
        refuse(f"{model} is not a decoder with layers of causal attention")
    for kind in ("layers", "mtp_layers"):
        for number, layer in enumerate(getattr(config, kind, None) or []):
            attention = layer.attention
            if attention is None:
                refuse(f"{kind}.{number} of {model} has linear attention, which has not been run with distca")
            if not isinstance(attention.inner_attention, VarlenAttention.Config):
                used = type(attention.inner_attention).__qualname__.removesuffix(".Config")
                refuse(f'{kind}.{number} of {model} has {used}: make the model with attn_backend="varlen"')
            yield f"{kind}.{number}", attention


def window_of(config: VarlenAttention.Config) -> int | None:
    """The window of a layer in rows, its own among them; None for all rows before it."""
    before, after = config.window_size
    if after != 0:
        refuse(f"window_size is {config.window_size}: a row cannot see later rows; (W, 0) and (-1, 0) are allowed")
    return None if before < 0 else before + 1


def refuse(message: str) -> NoReturn:
    """Raises InvalidArgumentError with the message."""
    raise InvalidArgumentError(f"torchtitan: {message}")
