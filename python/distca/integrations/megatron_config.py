"""What Megatron's configuration asks for, as distca takes it."""

from __future__ import annotations

from typing import Any

from distca.errors import InvalidArgumentError
from distca.integrations import megatron_names as names
from distca.pipeline.recomputation import groups_of_stages

#: What these fields of TransformerConfig must be, because distca's attention or its ticks do nothing else.
ALLOWED = {
    **dict.fromkeys(("multi_latent_attention", "hybrid_context_parallel", "is_hybrid_model", "moe_paged_stash"), False),
    **dict.fromkeys(("apply_query_key_layer_scaling", "batch_invariant_mode"), False),
    **dict.fromkeys(("use_kitchen_attention", "enable_autocast", "flash_decode"), False),
    **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading", "heterogeneous_block_specs"), False),
    **dict.fromkeys(("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "use_ring_exchange_p2p"), False),
    **dict.fromkeys(("fp8_dot_product_attention", "fp8_multi_head_attention", "defer_embedding_wgrad_compute"), False),
    **dict.fromkeys(("experimental_attention_variant", "linear_attention_freq", "fp8", "fp4"), None),
    **dict.fromkeys(("mtp_num_layers", "pipeline_model_parallel_layout"), None),
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "context_parallel_size"), 1),
    "num_microbatches_with_partial_activation_checkpoints": None,
    "attention_dropout": 0,
    "softmax_type": "vanilla",
    "cuda_graph_impl": "none",
}


def check_config(config: Any) -> None:
    """Raises InvalidArgumentError for the first field of the configuration that is not as it must be."""
    check_fields(config, ALLOWED, "distca")


def check_fields(config: Any, fields: dict[str, Any], what: str) -> None:
    """Raises InvalidArgumentError for the first of these fields whose value is not the one that `what` allows."""
    for name, allowed in fields.items():
        found = getattr(config, name, allowed)
        if found != allowed and (found or allowed):
            raise InvalidArgumentError(
                f"Megatron's {name} = {found!r} does not go together with {what}; {allowed!r} is allowed"
            )


def asks_for_max_logits(config: Any) -> bool:
    """Whether Megatron wants the largest logits of each head, to clip weights by them (QK-Clip) or to log them."""
    return bool(getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False))


def window_of_layer(config: Any, layer_number: int) -> int | None:
    """How many keys a row of a layer sees, its own and those before it; None for all. Layers are counted from 1.

    Raises InvalidArgumentError if a window reaches behind a row.
    """
    if not names.is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before, behind = config.window_size
    if behind != 0 or before < -1:
        raise InvalidArgumentError(
            f"Megatron's window_size = {config.window_size!r} does not go together with distca; (n, 0) is allowed, and "
            "(-1, 0) for no window"
        )
    return None if before == -1 else int(before) + 1


def layers_of_stages(config: Any, num_stages: int) -> list[int]:
    """The layers of each stage's chunks. Raises InvalidArgumentError if those of a stage differ, or have none."""
    virtual = range(config.virtual_pipeline_model_parallel_size or 0) or [None]
    layers = [[names.get_num_layers_to_build(config, chunk, stage) for chunk in virtual] for stage in range(num_stages)]
    if any(len(set(of_stage)) > 1 or 0 in of_stage for of_stage in layers):
        raise InvalidArgumentError(
            f"Megatron gives the chunks of the stages {layers} layers; at least one, and as many in all chunks of a "
            "stage are allowed (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split = False)"
        )
    return [of_stage[0] for of_stage in layers]


def recomputed(config: Any, layers: list[int]) -> list[int] | None:
    """What activation checkpointing runs again in stages with these layers, as `distca.pipeline.Ticks` takes it.

    Raises InvalidArgumentError if a shallow stage ends inside a group of layers.
    """
    depth, size = max(layers), config.recompute_num_layers
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        groups = [min(size, depth - begin) for begin in range(0, depth, size)]
    elif config.recompute_granularity == "full":
        groups = [int(layer < size) for layer in range(depth)]
    elif config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
        groups = [1] * depth
    else:
        return None
    groups_of_stages("PlannedBatches, from Megatron's recompute_num_layers", groups, layers)
    return groups
