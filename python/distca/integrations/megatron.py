"""Megatron-core on distca: core attention for the slot of a layer spec, and `init`."""

from __future__ import annotations

from typing import Any

import torch

from distca.connect.init import init as init_context
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.integrations import megatron_names as names
from distca.integrations.megatron_batches import DistcaPackedSeqParams, PlannedBatches
from distca.integrations.megatron_batches import document_lengths as document_lengths
from distca.integrations.megatron_config import asks_for_max_logits, check_config, window_of_layer
from distca.integrations.megatron_schedule import tick_schedule
from distca.ops import core_attention
from distca.planner.plan import Plan, Plans

__all__ = ["DistcaCoreAttention", "DistcaPackedSeqParams", "PlannedBatches", "init", "tick_schedule", "use_distca"]


class DistcaCoreAttention(names.MegatronModule):  # type: ignore[misc]
    """Core attention in the slot ``self_attention.submodules.core_attention`` of a layer spec. `use_distca` puts it in.

    Megatron calls it with q ``[T, H, D]``, k and v ``[T, Hkv, D]`` of this rank's rows and heads. Its
    ``packed_seq_params`` are `DistcaPackedSeqParams`.

    Attributes:
        current_max_attn_logits: with ``qk_clip`` or ``log_max_attention_logit``, the largest logit of each head in the
            rows of this rank, ``[H]`` float32, since it was None last. Megatron's ``clip_qk`` takes the largest of all
            data ranks, and sets it to None where it clips.

    Raises:
        InvalidArgumentError: the configuration asks for what distca's attention does not do.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = names.AttnMaskType.causal,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        check_config(config)
        given = {name: value for name, value in options.items() if value}
        if attention_type != "self" or given:
            raise InvalidArgumentError(
                f"DistcaCoreAttention: attention_type = {attention_type!r}, other options {given}; self attention "
                "without other options is allowed"
            )
        self.layer_number, self.window = layer_number, window_of_layer(config, layer_number)
        self._options: dict[str, Any] = {"scale": softmax_scale, "deterministic": config.deterministic_mode}
        self._options["max_logits"] = asks_for_max_logits(config)
        self.current_max_attn_logits: torch.Tensor | None = None
        self._check_mask(attn_mask_type)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of this rank's rows, ``[T, H, D]``."""
        if not isinstance(packed_seq_params, DistcaPackedSeqParams):
            raise InvalidArgumentError(
                f"DistcaCoreAttention: packed_seq_params is a {type(packed_seq_params).__name__}. What to change: pass "
                "data_iterator.packed_seq_params() of PlannedBatches, or DistcaPackedSeqParams(..., plan=plan)"
            )
        if attention_mask is not None or attention_bias is not None:
            raise InvalidArgumentError(
                "DistcaCoreAttention: attention_mask or attention_bias is given; the plan says what rows see. What to "
                "change: pass None (Megatron-LM: --no-create-attention-mask-in-dataloader)"
            )
        self._check_mask(attn_mask_type)
        plan = packed_seq_params.plan
        plan = plan.for_window(self.window) if isinstance(plan, Plans) else plan
        if isinstance(plan, Plan) and not plan.same_window(self.window):
            raise InvalidArgumentError(
                f"DistcaCoreAttention: layer {self.layer_number} is causal with a window of {self.window}, the plan "
                f"{plan.mask} with one of {plan.window}. What to change: distca.plan(..., window={self.window})"
            )
        context, layer = packed_seq_params.context, self.layer_number
        out, _, *largest = core_attention(query, key, value, plan, context=context, layer=layer, **self._options)
        for found in largest:
            before = self.current_max_attn_logits
            self.current_max_attn_logits = found if before is None else torch.maximum(before, found)
        return out

    def _check_mask(self, kind: Any) -> None:
        allowed = (None, names.AttnMaskType.causal, names.AttnMaskType.padding_causal)
        if kind not in allowed:
            raise InvalidArgumentError(f"DistcaCoreAttention: attn_mask_type = {kind}; causal is allowed")


def use_distca(spec: Any) -> Any:
    """Puts `DistcaCoreAttention` into every self attention of a spec of a layer or of a block of layers.

    The spec may be Megatron's local one or that of Transformer Engine. It is changed in place, and returned.

    Raises:
        InvalidArgumentError: there is no self attention with such a slot, or a layer has cross attention.
    """
    layers = getattr(spec, "layer_specs", None) or [spec]
    for layer in layers:
        submodules = getattr(layer, "submodules", None)
        attention: Any = getattr(getattr(submodules, "self_attention", None), "submodules", None)
        if getattr(getattr(submodules, "cross_attention", None), "submodules", None) is not None:
            raise InvalidArgumentError("use_distca: a layer has cross attention, which distca does not do")
        if not hasattr(attention, "core_attention"):
            raise InvalidArgumentError("use_distca: a layer has no self_attention.submodules.core_attention")
        attention.core_attention = DistcaCoreAttention
    return spec


def init(config: Any, *, max_tokens: int, **options: Any) -> Context:
    """`distca.init` with the groups of Megatron's `parallel_state` and the heads of its configuration.

    All processes make the call, after ``initialize_model_parallel``.

    Args:
        config: the model's TransformerConfig.
        max_tokens, options: as in `distca.init`.
    """
    heads = Heads(
        q=config.num_attention_heads, kv=config.num_query_groups, dim=config.kv_channels, dtype=config.params_dtype
    )
    groups = {"tensor_parallel": names.tensor_group(), "pipeline_parallel": names.pipeline_group()}
    return init_context(max_tokens=max_tokens, heads=heads, **groups, **options)
