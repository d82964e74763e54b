"""A tiny configuration of every language model of transformers, and weights with which mistakes show.

An entry is one of transformers' table of causal language models or, with ", masked" after its name, of that of masked
language models, whose rows see those after them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

_MASKED = ", masked"

#: The class of each entry.
CLASSES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | {
    f"{name}{_MASKED}": of for name, of in MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()
}

#: Whether this transformers is older than the pinned one, which gave its AttentionInterface to more models.
OLD = Version(transformers.__version__) < Version("5.24")

_ALL_SHARED = "The set of layer types producing a cache is different than the set of layer types using them"

#: Entries of which no language model can be made here: the reason, and what transformers says.
NOT_BUILT: dict[str, tuple[str, str]] = {
    "gemma3n": (
        "its image tower needs the package timm; its text model is the entry gemma3n_text",
        "requires the timm",
    ),
}
_ASSISTANT = (
    ("its configuration wants all keys and values shared, which its layers refuse", _ALL_SHARED)
    if OLD
    else ("it takes the keys and values of the model that it assists", "shared_kv_states cannot be None")
)
NOT_BUILT |= {"gemma4_assistant": _ASSISTANT, "gemma4_unified_assistant": _ASSISTANT}

VOCABULARY = 61
WINDOW = 12

_BY_VALUE: dict[Any, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"),
    # widths
    32: ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "embedding_dim", "word_embed_proj_dim")
    + ("backbone_hidden_size", "input_embedding_size", "output_embedding_size", "out_hidden_size", "audio_vocab_size"),
    48: ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner", "dff", "dim_ff", "decoder_ffn_dim")
    + ("encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size")
    + ("prefix_dense_intermediate_size",),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank")
    + ("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_experts_intermediate_size")
    + ("v_head_dim",),
    64: ("mamba_d_ssm",),
    # heads
    16: ("head_dim", "swa_head_dim", "dim_head", "kv_channels", "swa_v_head_dim", "kv_lora_rank", "o_lora_rank")
    + ("qk_nope_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "chunk_size", "mamba_chunk_size")
    + ("attention_chunk_size", "num_position_embeddings"),
    8: ("qk_rope_head_dim", "hidden_size_per_layer_input", "laurel_rank", "hc_lowrank", "gated_norm_rank")
    + ("adapter_rank", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim")
    + ("index_topk", "mamba_d_state", "ssm_state_size", "state_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
    + ("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads")
    + ("swa_num_attention_heads", "rotary_dim", "num_experts", "num_local_experts", "n_routed_experts")
    + ("moe_num_experts", "mamba_n_heads", "mamba_num_heads"),
    # layers, key/value heads, experts of a token
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
    + ("num_decoder_layers", "num_encoder_layers", "num_blocks", "num_key_value_heads", "swa_num_key_value_heads")
    + ("num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "linear_num_heads")
    + ("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "zero_expert_num"),
    1: ("n_group", "topk_group", "num_codebooks", "bos_token_id"),
    0: ("pad_token_id",),
    9: ("query_pre_attn_scalar",),
    # rows
    256: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "max_target_positions")
    + ("max_source_positions",),
    WINDOW: ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
    + ("keep_window_size", "local_attention_window_len"),
    None: ("eos_token_id",),
}

#: The value of each field of a configuration, by the field's name, in every model that has it.
SIZES: dict[str, Any] = {name: value for value, names in _BY_VALUE.items() for name in names} | {
    "is_decoder": True,
    "attn_logit_softcapping": 1.5,
}

#: Numbers whose names contain one of these become 0.
DROPOUTS = ("dropout", "pdrop", "layerdrop", "jitter")

#: These fields stay None where a model's default is None, because None says that the model lacks the feature.
OPTIONAL = ("sliding_window", "attn_logit_softcapping", "num_experts", "n_group", "topk_group", "num_local_experts")

_DOTS_TEXT = {
    **{"head_dim": 24, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24},
    **{"swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 24},
}
_QWEN4_TEXT = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 4},
}
_GEMMA4 = {"global_head_dim": 16}

#: What an entry needs in addition. A nested dictionary is for a part of the configuration.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 16, "decoder_config": {"hidden_size_global": 32}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "initializer_range": 1.0},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS_TEXT,
        "vision_config": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "feature_size": 8}
        | {"downsample_hidden_size": 8},
    },
    "dots3_note_text": _DOTS_TEXT,
    "esmc": {"num_key_value_heads": 4, "head_dim": 8},
    "gemma3": {"vision_config": {"image_size": 16, "patch_size": 8}, "mm_tokens_per_image": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"text_config": _GEMMA4, "vision_config": {"position_embedding_size": 16}},
    "gemma4_assistant": {
        "text_config": _GEMMA4
        | {"model_type": "gemma4_text", "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 0}
        | {"hidden_size_per_layer_input": 0}
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {
        "text_config": _GEMMA4,
        "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16, "patch_size": 4},
        "audio_config": {"audio_embed_dim": 32},
    },
    "gemma4_unified_assistant": {
        "text_config": _GEMMA4 | {"model_type": "gemma4_unified_text", "num_kv_shared_layers": 2}
    },
    "gemma4_unified_text": _GEMMA4,
    "got_ocr2": {"vision_config": {"image_size": 32, "patch_size": 8, "output_channels": 8, "mlp_dim": 48}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 8, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 32},
    "mamba2": {"n_groups": 2},
    "nemotron_h": {"n_groups": 2},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 1, "num_cross_attention_heads": 4}
    | {"num_self_attention_heads": 4},
    "phi4_multimodal": {
        "audio_config": {"nemo_conv_channels": 8, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}
    },
    "prophetnet": {"num_buckets": 8},
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "qwen4_exp_text": _QWEN4_TEXT,
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "lsh"]}
    | {"num_buckets": 4, "attention_head_size": 8, "max_position_embeddings": 64},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 8}
    | {"shape_embed_dim": 8},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_ngroups": 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def config_of(entry: str, options: dict[str, Any]) -> transformers.PreTrainedConfig:
    """The tiny configuration that the entry's class takes; it may be a part of the entry's own configuration."""
    name = entry.removesuffix(_MASKED)
    config = _tiny(CONFIG_MAPPING[name], OVERRIDES.get(name, {}) | options, is_masked(entry))
    wanted = class_of(entry).config_class
    parts = [getattr(config, name) for name in config.sub_configs]
    return config if type(config) is wanted else next((part for part in parts if type(part) is wanted), config)


def is_masked(entry: str) -> bool:
    """Whether it is a masked language model."""
    return entry.endswith(_MASKED)


def class_of(entry: str) -> Any:
    return getattr(transformers, CLASSES[entry])


def _tiny(
    kind: type[transformers.PreTrainedConfig], options: dict[str, Any], masked: bool
) -> transformers.PreTrainedConfig:
    fields = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, default in fields.items():
        if name in SIZES and not (default is None and name in OPTIONAL):
            values[name] = not masked if name == "is_decoder" else SIZES[name]
        elif isinstance(default, float | int) and any(part in name for part in DROPOUTS):
            values[name] = type(default)(0)
    # Latent attention has as many key/value heads as query heads.
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "layer_types" in fields and "layer_types" not in options:
        kinds = list(dict.fromkeys(kind().layer_types or ()))  # one layer of each kind, and at least two layers
        if kinds:
            kinds = kinds if len(kinds) > 1 else kinds * 2
            values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    values |= options
    for name, part in kind.sub_configs.items():
        of_part = dict(options.get(name, {}))
        if part is transformers.AutoConfig:
            model_type = of_part.pop("model_type", None)
            part = CONFIG_MAPPING[model_type] if model_type else type(getattr(kind(), name))
        values[name] = _tiny(part, of_part, masked)
    return kind(**values)


def model_of(entry: str, attention: str, options: dict[str, Any]) -> torch.nn.Module:
    """The entry's model. Its weights depend on the options alone, not on the attention."""
    torch.manual_seed(5)
    model = class_of(entry)._from_config(config_of(entry, options), attn_implementation=attention)
    _set_weights(model)
    return model


def _set_weights(model: torch.nn.Module) -> None:
    """Gives matrices a gain of 1.5, and moves norms, biases and sinks from their initial values by different amounts.

    With transformers' initial weights attention is nearly uniform: a wrong position then changes a loss by 1e-6 only.
    Layers that do not scale their normalised queries (Gemma 4) learn to; without that, a row of wide heads sees one key
    alone, and rounding decides which.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                weight.copy_(noise * (1.5 / math.sqrt(weight.shape[-1])))
            else:
                weight.add_(0.2 * noise)
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm") and module.head_dim >= 256:
                module.q_norm.weight.mul_(module.head_dim**-0.5)
