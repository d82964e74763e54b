"""What a model of transformers needs from a plan: heads, windows, a mask, a number of calls.

They are read from the model's configuration. The mask is read from its modules as well, because most configurations do
not say it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from distca.errors import InvalidArgumentError
from distca.heads import Heads, LayerHeads
from distca.planner.layout import Chunk, Window

NAME = "distca"
#: The types of layers that call attention once, and whether they have the configuration's sliding window. Hybrid layers
#: are recurrent as well. Before transformers 5.15 "attention" and "mamba" are types, too.
ATTENTION = {
    **{"full_attention": False, "chunked_attention": False, "hybrid": False, "attention": False},
    **{"sliding_attention": True, "hybrid_sliding": True},
}
#: The types of layers without attention.
NO_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")
#: By model type, why a model cannot take a plan. Neither its modules nor its layer types tell this.
REFUSED = {
    "convbert": "the model's attention has a convolution, over the borders of documents and ranks",
    "blt": "the model groups the bytes of a row into patches, and attends to those",
    "deepseek_v4": "the model attends to compressed groups of rows",
    "reformer": "the model attends among rows that it has hashed alike",
}
#: Models whose configuration has a sliding window that their layers do not use.
_NO_WINDOW = ("moshi",)
#: Models with a full mask whose rows see those, too, that lie as far away as the configuration's window says. So it is
#: in every model whose configuration says is_causal=False.
_TO_FAR_END = ("embedding_gemma2_text", "modernbert", "neomme", "openai_privacy_filter", "ultrabert")
#: How often each attention layer calls attention; once in models that are not listed.
_CALLS_PER_LAYER = {"diffllama": 2}
#: Models that run some of their layers several times, as their n_recurrent_loops says.
_LOOPS = ("dory",)


def refuse(condition: bool, message: str) -> None:
    """Raises InvalidArgumentError with the message if the condition holds."""
    if condition:
        raise InvalidArgumentError(f'attn_implementation="{NAME}": {message}')


def check_rows(batch: int, num_rows: int, planned: int, rank: int) -> None:
    """Raises InvalidArgumentError unless a layer has one packed row, of as many rows as the plan has on this rank."""
    # Messages with numbers of rows are made only where they are raised: a graph of any number of rows cannot make one.
    if batch != 1:
        refuse(
            True,
            f"batch size is {batch}, must be 1: pack the documents of this rank one after the other into one row, "
            "input_ids [1, T], and give their lengths to the plan; or take hf.unpad(model) and pass no plan",
        )
    if num_rows != planned:
        refuse(
            True,
            f"the input has {num_rows} rows but the plan was made for {planned} rows on rank {rank}: "
            "make a plan of this batch's layout",
        )


def kinds_of(config: PreTrainedConfig) -> list[str]:
    """The type of each layer of a text model; empty if its configuration does not say them."""
    return list(getattr(config, "layer_types", None) or ())


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model, or the model itself, that makes the rows of the last layer from tokens or embeddings."""
    text = model.get_decoder()
    return text if isinstance(text, PreTrainedModel) else model.base_model  # ModernBERT's is the layer of its logits


def own_modules(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    """The modules of a model's text model, by name, without those of models inside it: encoders of images and sound."""
    text = text_model(model)
    inside = (m for m in text.modules() if isinstance(m, PreTrainedModel) and m is not text and m.config is not None)
    apart = {m for part in inside for m in part.modules()}
    return [(name, m) for name, m in text.named_modules() if m not in apart]


def num_attention_calls(config: PreTrainedConfig) -> int:
    """How often a forward pass of the model calls attention."""
    config = config.get_text_config()
    without = sum(kind in NO_ATTENTION for kind in kinds_of(config))
    again = (config.n_recurrent_loops - 1) * config.n_recurrent_layers if config.model_type in _LOOPS else 0
    return (config.num_hidden_layers - without + again) * _CALLS_PER_LAYER.get(config.model_type, 1)


def takes_plans(config: PreTrainedConfig) -> bool:
    """Whether the configuration, or one inside it, asks for this attention."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return any(getattr(part, "_attn_implementation", None) == NAME for part in (config, *parts))


def heads_of(config: PreTrainedConfig, dtype: torch.dtype) -> LayerHeads:
    """The head shape of a language model's attention layers, for `distca.init` and `distca.plans`.

    Args:
        config: the model's configuration.
        dtype: the dtype of q, k and v.

    Returns:
        The heads of all layers. Where layers of different windows have different ones (Gemma 4, MiMo V2 Flash), a
        mapping from each of `windows_of` to its heads.

    Raises:
        InvalidArgumentError: the configuration has no attention, or layers of one window differ in their heads.
    """
    config = config.get_text_config()
    _check_has_layers(config)
    refuse(
        getattr(_config_of_layer(config, 0), "num_attention_heads", None) is None,
        f"the configuration ({config.model_type}) has no num_attention_heads: the model has no attention layers, or "
        "its attention is of another kind",
    )
    shapes_of_layers = [_heads_of_layer(config, layer) for layer in range(config.num_hidden_layers)]
    if len(set(shapes_of_layers)) == 1:
        return Heads(*shapes_of_layers[0], dtype)
    layers: dict[Window, dict[tuple[int, int, int, int], int]] = {}
    for layer, window in _attention_layers(config):
        layers.setdefault(window, {}).setdefault(shapes_of_layers[layer], layer)
    for window, first_layers in layers.items():
        shapes = "; ".join(
            f"layer {layer}: q={q}, kv={kv}, dim={dim}, v_dim={v_dim}"
            for (q, kv, dim, v_dim), layer in first_layers.items()
        )
        refuse(
            len(first_layers) > 1,
            f"layers of the window {window} differ in their heads ({shapes}), and layers of a window share a plan: not "
            "supported yet",
        )
    found = {window: Heads(*shape, dtype) for window, of_window in layers.items() for shape in of_window}
    first = next(iter(found.values()))  # layers without attention may say other heads
    return found if any(heads != first for heads in found.values()) else first


def differ_in_heads(config: PreTrainedConfig) -> bool:
    """Whether `heads_of` is a mapping."""
    try:
        return not isinstance(heads_of(config, torch.float32), Heads)
    except InvalidArgumentError:  # the caller has found heads where the configuration does not say them
        return False


def _config_of_layer(config: Any, layer: int) -> Any:
    """The configuration with the values of one layer. That of a model whose layers differ does not tell them."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def _heads_of_layer(config: Any, layer: int) -> tuple[int, int, int, int]:
    """(q, kv, dim, v_dim) of a layer."""
    kind = config.model_type
    config = _config_of_layer(config, layer)
    of_layers = getattr(config, "num_attention_heads_per_layer", None)
    q = of_layers[layer] if of_layers else config.num_attention_heads
    v_dim = getattr(config, "v_head_dim", None)
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention makes keys for every query head
        dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return q, q, dim, v_dim or dim
    kv = getattr(config, "num_key_value_heads", None) or q
    if getattr(config, "multi_query", False):
        kv = 1
    if kind == "jetmoe":  # keys are repeated for the experts of a token
        kv = q
    if kind == "mimo_v2_flash" and config.layer_types[layer] == "sliding_attention":
        kv *= 2
    width = "true_hidden_size" if hasattr(config, "true_hidden_size") else "hidden_size"  # MobileBERT's are narrower
    dim = getattr(config, "head_dim", None) or getattr(config, width) // q
    wide = getattr(config, "global_head_dim", None)  # Gemma 4 before transformers 5.15
    if wide is not None and config.layer_types[layer] == "full_attention":
        dim, kv = wide, (config.attention_k_eq_v and config.num_global_key_value_heads) or kv
    return q, kv, dim, v_dim or dim


def windows_of(config: PreTrainedConfig) -> list[Window]:
    """The sliding window of every layer with attention; None if its rows see their whole document up to themselves, and
    `distca.Chunk` if they see their chunk of it.

    Args:
        config: the model's configuration.

    Raises:
        InvalidArgumentError: no layer has attention, or a layer's type is not known.
    """
    return [window for _, window in _attention_layers(config.get_text_config())]


def _attention_layers(config: Any) -> list[tuple[int, Window]]:
    """The number and the window of each layer with attention."""
    kinds = kinds_of(config)
    if not kinds:
        _check_has_layers(config)
        return [(layer, _window_of_layer(config, layer)) for layer in range(config.num_hidden_layers)]
    known = (*ATTENTION, *NO_ATTENTION)
    for layer, kind in enumerate(kinds):
        refuse(
            kind not in known,
            f"layer {layer} of the model is of type {kind}, must be one of {', '.join(known)}: other types choose "
            "their keys themselves",
        )
    layers = [(layer, _window_of_layer(config, layer)) for layer, kind in enumerate(kinds) if kind in ATTENTION]
    check_has_attention(kinds)
    return layers


def check_has_attention(kinds: list[str]) -> None:
    """Refuses a model none of whose layers has attention. `kinds` are their types, as far as its configuration says."""
    refuse(
        bool(kinds) and not any(kind in ATTENTION for kind in kinds),
        f"none of the model's layers has attention; their types are {', '.join(dict.fromkeys(kinds))}",
    )


def _check_has_layers(config: Any) -> None:
    refuse(
        getattr(config, "num_hidden_layers", None) is None,
        f"the configuration ({config.model_type}) has no num_hidden_layers: "
        + REFUSED.get(config.model_type, "its layers are of another kind"),
    )


def _window_of_layer(config: Any, layer: int) -> Window:
    """The window of a layer with attention."""
    kinds, of_layer = kinds_of(config), _config_of_layer(config, layer)
    if kinds and kinds[layer] == "chunked_attention":
        rows = getattr(of_layer, "attention_chunk_size", None)
        return None if rows is None else Chunk(rows)
    if config.model_type in _NO_WINDOW or (kinds and not ATTENTION[kinds[layer]]):
        return None
    window: int | None = getattr(of_layer, "sliding_window", None)
    to_far_end = config.model_type in _TO_FAR_END or not getattr(config, "is_causal", True)
    return window if window is None else window + to_far_end


def mask_of(model: PreTrainedModel) -> str:
    """The mask of a model's plans, for `distca.plans`: ``"full"`` if rows see those after them, as in encoders of text
    (BERT, ModernBERT, EmbeddingGemma) and in models whose configuration says ``is_causal=False``; else ``"causal"``.

    A layer of the model refuses a plan of another mask than the model asks for.

    Args:
        model: the model, without wrappers.
    """
    config: Any = model.config.get_text_config()
    if not getattr(config, "is_causal", True):
        return "full"
    if hasattr(config, "use_bidirectional_attention"):  # PaliGemma's says so of its prefixes
        return "full" if config.model_type == "gemma3_text" and config.use_bidirectional_attention else "causal"
    says = {bool(m.is_causal) for _, m in own_modules(model) if hasattr(m, "is_causal") and _makes_full_masks(m)}
    return "full" if says == {False} else "causal"


def _makes_full_masks(layer: torch.nn.Module) -> bool:
    """Whether the file of a layer makes full masks. CLIP's layers say that they are not causal, and get causal ones."""
    files = (vars(sys.modules[kind.__module__]) for kind in type(layer).__mro__)
    return any(f"create_bidirectional_{mask}" in file for file in files for mask in ("mask", "sliding_window_mask"))
