"""What a model of transformers needs from a plan, and what in the model no plan can express.

Both are read from the model's configuration and modules.

A plan knows rows by document and position. Anything else in a model that looks along the rows of its tensor sees the
borders of ranks instead of those of documents. Recurrent modules run on each document by itself (hf_recurrent.py), if
documents are whole. What else there is (positions counted by row, other convolutions) is refused here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel

from distca.errors import InvalidArgumentError
from distca.heads import Heads, LayerHeads
from distca.integrations.hf_recurrent import (
    cut_document,
    is_recurrent,
    looks_along_rows,
    run_by_document,
    whole_pieces,
)
from distca.integrations.hf_rope import watch
from distca.planner.layout import PADDING, Chunk, Layout, Window

NAME = "distca"
#: The types of layers that call attention once, and whether they have the configuration's sliding window. Hybrid layers
#: are recurrent as well. Before transformers 5.15 "attention" and "mamba" are types, too.
_ATTENTION = {
    **{"full_attention": False, "chunked_attention": False, "hybrid": False, "attention": False},
    **{"sliding_attention": True, "hybrid_sliding": True},
}
#: The types of layers without attention.
_NO_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")
#: The types of layers that have at least one recurrent module each.
_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")

#: By model type, why a model cannot take a plan. Neither its modules nor its layer types tell this.
_REFUSED = {
    "blt": "the model groups the bytes of a row into patches, and attends to those",
    "deepseek_v4": "the model attends to compressed groups of rows",
    "reformer": "the model attends among rows that it has hashed alike",
}
#: By model type, why a model cannot take a plan in training.
_REFUSED_IN_TRAINING = {
    "phimoe": "the router draws experts at random, and ranks would differ from one process: call model.eval()"
}
#: By the name of an option, what a model that has it does along the rows of its tensor outside of any module.
_ALONG_ROWS = {
    "token_dropout": "scales embeddings by how many rows are masked",
    "trigram_input": "takes the embeddings of a row's neighbours with its own",
}
_JITTER = ("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")

#: Models that do not hand keywords on to their layers. Only torch.compile needs this list.
_DROPS_KEYWORDS = ("bigbird_pegasus", "nemotron", "stablelm")

#: Models that do not call transformers' AttentionInterface. Only torch.compile needs this list.
_BYPASSES = ("cpmant", "openai-gpt", "prophetnet", "xlm", "xlnet")

#: Models whose configuration has a sliding window that their layers do not use.
_NO_WINDOW = ("moshi",)

#: Models with a full mask whose rows see those, too, that lie as far away as the configuration's window says. So it is
#: in every model whose configuration says is_causal=False.
_TO_FAR_END = ("embedding_gemma2_text", "modernbert", "neomme", "openai_privacy_filter", "ultrabert")

#: Where a model's forward computes a loss. All but transformers' own function know no shift_labels.
_LOSSES = re.compile(r"\b(?:loss_function|\w*loss_fct|\w*loss_fn|\w*Loss|cross_entropy)\(")

#: How the classes of models end that make one result of a whole row of the batch.
_POOLING = (
    *("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "DoubleHeadsModel"),
    *("NeoMMEForRetrieval", "SplinterForQuestionAnswering"),
)

#: How the classes of models end whose labels are of the rows themselves, not of the rows after them.
_LABELS_OF_ROWS = ("ForMaskedLM", "ForTokenClassification", "ElectraForPreTraining")

#: How often each attention layer calls attention; once in models that are not listed.
_CALLS_PER_LAYER = {"diffllama": 2}

#: Models that run some of their layers several times, as their n_recurrent_loops says.
_LOOPS = ("dory",)


def refuse(condition: bool, message: str) -> None:
    """Raises InvalidArgumentError with the message if the condition holds."""
    if condition:
        raise InvalidArgumentError(f'attn_implementation="{NAME}": {message}')


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the modules of a model tell.

    Attributes:
        recurrent: the recurrent modules, by name.
        along_rows: name and type of another module that looks along the rows of its tensor; None if there is none.
        first_position: the position of a document's first row.
        checkpointed: modules that activation checkpointing may run again.
    """

    recurrent: dict[str, torch.nn.Module]
    along_rows: str | None
    first_position: int
    checkpointed: list[torch.nn.Module]


_examined: weakref.WeakKeyDictionary[PreTrainedModel, Examined] = weakref.WeakKeyDictionary()


def examine(model: PreTrainedModel) -> Examined:
    """Looks through the modules of a model's decoder, once. RoPE modules get hooks, recurrent ones another forward."""
    found = _examined.get(model)
    if found is None:
        modules = _own_modules(model)
        recurrent = {name: m for name, m in modules if is_recurrent(m)}
        inside = {part for m in recurrent.values() for part in m.modules() if part is not m}
        recurrent = {name: m for name, m in recurrent.items() if m not in inside}
        for module in recurrent.values():
            run_by_document(module, functools.partial(takes_plans, model.config))
        others = ((name, m) for name, m in modules if m not in inside and looks_along_rows(m))
        along = next((f"{name} ({type(m).__name__})" for name, m in others), None)
        firsts = [int(m.padding_idx) + 1 for _, m in modules if _counts_from_padding(m)]  # type: ignore[arg-type]
        checkpointed = [m for _, m in modules if hasattr(m, "gradient_checkpointing")]
        watch(model)
        found = _examined[model] = Examined(recurrent, along, firsts[0] if firsts else 0, checkpointed)
    return found


def _counts_from_padding(module: torch.nn.Module) -> bool:
    """Whether positions begin after the number of the padding token, as RoBERTa's do, and those that ESM learns."""
    makers = ("create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds")
    return hasattr(module, "position_embeddings") and any(hasattr(module, name) for name in makers)


def _own_modules(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    """The modules of a model's text model, by name, without those of models inside it: encoders of images and sound."""
    text = model.get_decoder()
    if not isinstance(text, PreTrainedModel):  # ModernBERT's is the layer of its logits
        text = model.base_model
    inside = (m for m in text.modules() if isinstance(m, PreTrainedModel) and m is not text and m.config is not None)
    apart = {m for part in inside for m in part.modules()}
    return [(name, m) for name, m in text.named_modules() if m not in apart]


def check_model(model: PreTrainedModel, num_ranks: int, layout: Layout | None = None) -> None:
    """Raises InvalidArgumentError if a plan cannot express something in the model. The message names it.

    Without a layout, documents are taken to be cut in some step.
    """
    config = model.config.get_text_config()
    kind = config.model_type
    refuse(kind in _REFUSED, _REFUSED.get(kind, ""))
    other = next((kind for kind in _kinds(config) if kind not in (*_ATTENTION, *_NO_ATTENTION)), None)
    refuse(
        other is not None,
        f"the model has layers of type {other}, which choose their keys themselves: not supported yet",
    )
    examined = examine(model)
    _check_recurrent(config, examined, num_ranks, layout)
    along = examined.along_rows
    refuse(
        along is not None,
        f"the model's module {along} looks along the rows of its tensor, over the borders of documents and ranks: not "
        "supported yet",
    )
    for option, what in _ALONG_ROWS.items():
        refuse(
            bool(getattr(config, option, False)),
            f"the model {what} ({option}), over the borders of documents and ranks: not supported yet",
        )
    _check_peft(model)
    if layout is not None:
        _check_pooling(model, layout)
    if num_ranks > 1 and model.training:
        refuse(kind in _REFUSED_IN_TRAINING, _REFUSED_IN_TRAINING.get(kind, ""))
        jitter = next((name for name in _JITTER if getattr(config, name, None)), None)
        refuse(
            jitter is not None,
            f"the router adds random noise to its input, and ranks would differ from one process: set {jitter}=0.0 in "
            "the model's config",
        )


def _check_pooling(model: PreTrainedModel, layout: Layout) -> None:
    """Refuses models that make one result of a whole row of the batch, where that is not one document."""
    rank = rank_of_several_documents(layout) if _pools(type(model)) else None
    refuse(
        rank is not None,
        f"{type(model).__name__} makes one result of all rows of rank {rank}, which are not one whole document: take "
        "the result of the model inside, and pool the rows of each document yourself",
    )


def rank_of_several_documents(layout: Layout) -> int | None:
    """The first rank whose rows are not those of one whole document; None if there is none."""
    cut = cut_document(layout) is not None or bool(layout.branches)
    for rank in range(layout.num_ranks):
        pieces = whole_pieces(layout, rank)
        if cut or len(pieces) != 1 or pieces[0][0] == PADDING:
            return rank
    return None


def _pools(kind: type[PreTrainedModel]) -> bool:
    """Whether a model of this class makes one result of a whole row of the batch. Some take labels of whole documents
    beside those of rows, as in BERT's pretraining.
    """
    of_documents = {"next_sentence_label", "sentence_order_label"} & {*inspect.signature(kind.forward).parameters}
    return _is_one_of(kind, _POOLING) or bool(of_documents)


def _is_one_of(kind: type, endings: tuple[str, ...]) -> bool:
    """Whether the name of the class, or of one that it is derived from, ends so."""
    return any(base.__name__.endswith(endings) for base in kind.__mro__)


def _check_peft(model: PreTrainedModel) -> None:
    """Refuses adapters of a peft whose models call `forward`: what distca sees is then a model without its loss."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or not _calls_forward(peft.BaseTuner.forward):
        return
    refuse(
        any(isinstance(m, peft.BaseTunerLayer) for m in model.modules()),
        "this version of peft calls the forward of the model itself, past the checks of its loss: pip install -U peft",
    )


@functools.cache
def _calls_forward(forward: Callable[..., Any]) -> bool:
    return "self.model.forward(" in inspect.getsource(forward)


def _check_recurrent(config: PreTrainedConfig, examined: Examined, num_ranks: int, layout: Layout | None) -> None:
    """Raises InvalidArgumentError if recurrent layers cannot run on each document by itself."""
    num_layers = sum(kind in _RECURRENT for kind in _kinds(config))
    refuse(
        num_layers > len(examined.recurrent),
        f"the model has {num_layers} layers that carry a state from row to row (layer_types), and only "
        f"{len(examined.recurrent)} modules that are known to: the others would go on over the borders of documents",
    )
    if not examined.recurrent:
        return
    name, module = next(iter(examined.recurrent.items()))
    if layout is not None and layout.branches:
        branch, begins = next(iter(layout.branches.items()))
        refuse(
            True,
            f"the model's module {name} ({type(module).__name__}) carries a state from row to row, and document "
            f"{branch} would have to go on from that of document {begins[-1][0]}, with whose rows it begins: give each "
            "document rows of its own",
        )
    cut = None if layout is None else cut_document(layout)
    if layout is None or cut is not None:
        where = "documents may be cut between ranks" if cut is None else f"document {cut[0]} is cut on rank {cut[1]}"
        refuse(
            True,
            f"the model's module {name} ({type(module).__name__}) carries a state from row to row, and {where}: take "
            "homes of whole documents, such as distca.Layout.from_documents",
        )
    inner = (
        (f"{name}.{path}", part)
        for name, module in examined.recurrent.items()
        for path, part in module.named_modules()
        if part is not module
    )
    for path, part in inner if num_ranks > 1 else ():
        how, instead = _gathered_by(part)
        refuse(
            how is not None,
            f"the model's module {path} is {how} inside of a module that runs once for each document, and ranks have "
            f"different numbers of documents: their collectives would not match. {instead}",
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


def has_labels_of_rows(model: PreTrainedModel) -> bool:
    """Whether a row's label is its own target, so that a model shifts no labels."""
    return _is_one_of(type(model), _LABELS_OF_ROWS)


def has_own_loss(model: PreTrainedModel) -> bool:
    """Whether the model's loss is the mean over the rows of its tensor, whatever shift_labels says."""
    return _has_own_loss(type(model).forward)


@functools.cache
def _has_own_loss(forward: Callable[..., Any]) -> bool:
    """Whether a forward computes a loss, and hands neither shift_labels nor all of its keywords to it. Its source says
    this. Granite Speech and Qwen2-Audio are such models, and Gemma 3 and Qwen 3.5 with images up to transformers 5.16.
    """
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # a forward without a source is taken to use transformers' loss
        return False
    calls = [_arguments(source[found.end() :]) for found in _LOSSES.finditer(source)]
    return bool(calls) and not any("**" in call or "shift_labels=" in call for call in calls)


def _arguments(source: str) -> str:
    """What comes before the bracket that closes a call. Not by ast, which fails in several threads of Python 3.11."""
    depth = 1
    for end, letter in enumerate(source):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return source[:end]
    return source


def _kinds(config: PreTrainedConfig) -> list[str]:
    """The type of each layer of a text model; empty if its configuration does not say them."""
    return list(getattr(config, "layer_types", None) or ())


def num_attention_calls(config: PreTrainedConfig) -> int:
    """How often a forward pass of the model calls attention."""
    config = config.get_text_config()
    without = sum(kind in _NO_ATTENTION for kind in _kinds(config))
    again = (config.n_recurrent_loops - 1) * config.n_recurrent_layers if config.model_type in _LOOPS else 0
    return (config.num_hidden_layers - without + again) * _CALLS_PER_LAYER.get(config.model_type, 1)


def goes_another_way(model: PreTrainedModel) -> bool:
    """Whether a plan as a keyword is known not to be enough: the layers do not get it, or the model may be refused."""
    if _pools(type(model)) or _is_one_of(type(model), ("ForQuestionAnswering",)):
        return True
    config: Any = model.config.get_text_config()
    plain = ("full_attention", "attention", "sliding_attention", "chunked_attention")
    kinds = _kinds(config)
    return (
        config.model_type in (*_DROPS_KEYWORDS, *_BYPASSES, *_REFUSED)
        or any(kind not in plain for kind in kinds)
        or any(getattr(config, option, False) for option in ("attn_temperature_tuning", *_ALONG_ROWS))
    )


def drops_keywords(module: torch.nn.Module) -> bool:
    """Whether the layer's model is known not to hand keywords on to attention."""
    return getattr(getattr(module, "config", None), "model_type", None) in _DROPS_KEYWORDS


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
    kinds = _kinds(config)
    if not kinds:
        _check_has_layers(config)
        return [(layer, _window_of_layer(config, layer)) for layer in range(config.num_hidden_layers)]
    known = (*_ATTENTION, *_NO_ATTENTION)
    for layer, kind in enumerate(kinds):
        refuse(
            kind not in known,
            f"layer {layer} of the model is of type {kind}, must be one of {', '.join(known)}: other types choose "
            "their keys themselves",
        )
    layers = [(layer, _window_of_layer(config, layer)) for layer, kind in enumerate(kinds) if kind in _ATTENTION]
    refuse(not layers, f"none of the model's layers has attention; their types are {', '.join(dict.fromkeys(kinds))}")
    return layers


def _check_has_layers(config: Any) -> None:
    refuse(
        getattr(config, "num_hidden_layers", None) is None,
        f"the configuration ({config.model_type}) has no num_hidden_layers: "
        + _REFUSED.get(config.model_type, "its layers are of another kind"),
    )


def _window_of_layer(config: Any, layer: int) -> Window:
    """The window of a layer with attention."""
    kinds, of_layer = _kinds(config), _config_of_layer(config, layer)
    if kinds and kinds[layer] == "chunked_attention":
        rows = getattr(of_layer, "attention_chunk_size", None)
        return None if rows is None else Chunk(rows)
    if config.model_type in _NO_WINDOW or (kinds and not _ATTENTION[kinds[layer]]):
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
    says = {bool(m.is_causal) for _, m in _own_modules(model) if hasattr(m, "is_causal") and _makes_full_masks(m)}
    return "full" if says == {False} else "causal"


def _makes_full_masks(layer: torch.nn.Module) -> bool:
    """Whether the file of a layer makes full masks. CLIP's layers say that they are not causal, and get causal ones."""
    files = (vars(sys.modules[kind.__module__]) for kind in type(layer).__mro__)
    return any(f"create_bidirectional_{mask}" in file for file in files for mask in ("mask", "sliding_window_mask"))
