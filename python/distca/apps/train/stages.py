"""A pipeline's stage of a model of transformers: which layers it has, and how it is called.

A stage is the whole model without what other stages have. Its parameters keep the names that they have in the whole
model. Therefore a checkpoint can be read at another split.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from distca.apps.common.options import ConfigError
from distca.apps.train.split import ranges_of
from distca.integrations.hf_models import NO_ATTENTION, kinds_of, num_attention_calls


def norm_of(base: nn.Module) -> str:
    """The name of the norm behind the layers of a base model, or of what is in its place in other stages."""
    kinds = {name: type(module).__name__ for name, module in base.named_children()}
    return next((name for name, kind in kinds.items() if "Norm" in kind or kind == "Identity"), "norm")


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """The numbers of the layers with attention. The others, of hybrid models, carry a state from row to row."""
    text = config.get_text_config()
    kinds = kinds_of(text) or ["full_attention"] * text.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind not in NO_ATTENTION]


def attention_of_stages(model: PreTrainedModel, layers: Sequence[int], chunks: int) -> list[int]:
    """How many layers with attention each stage's chunks have.

    Args:
        model: the whole model.
        layers: the layers of each stage's chunks.
        chunks: chunks of each stage.

    Raises:
        ConfigError: a chunk has none, the chunks of a stage have different numbers of them, or a configuration cannot
            say which ones have it.
    """
    having = attention_layers(model.config)
    found: list[int] = []
    for stage in range(len(layers)):
        ranges = ranges_of(layers, stage, chunks)
        for of_chunk in ranges:
            try:
                config_of(model.config.get_text_config(), of_chunk)
            except AttributeError as error:
                raise ConfigError(
                    f"--pipeline: {type(model).__name__} finds the kinds of its layers by their numbers, and no "
                    f"configuration has those of layers {of_chunk.start} to {of_chunk.stop - 1} alone ({error})"
                ) from error
        numbers = {sum(layer in of_chunk for layer in having) for of_chunk in ranges}
        if len(numbers) > 1 or 0 in numbers:
            lie = ", ".join(f"{of_chunk.start} to {of_chunk.stop - 1}" for of_chunk in ranges)
            raise ConfigError(
                f"--layers-per-stage is {','.join(map(str, layers))}, by which stage {stage} has layers {lie}: each of "
                f"its chunks must have as many layers with attention, at least one; these are {having}"
            )
        found += numbers
    return found


def check_has_layers(model: PreTrainedModel, option: str) -> None:
    """Raises ConfigError, which names the option, unless the model's layers are a list, in which each has one attention
    or, in a hybrid model, none.
    """
    layers, name = getattr(model.base_model, "layers", None), type(model).__name__
    expected = model.config.get_text_config().num_hidden_layers
    if model.base_model is model or not isinstance(layers, nn.ModuleList) or len(layers) != expected:
        raise ConfigError(f"{option}: {name} has no list of {expected} layers below an embedding")
    having = attention_layers(model.config)
    other = next((number for number in having if not hasattr(layers[number], "self_attn")), None)
    if other is not None:
        raise ConfigError(f"{option}: layer {other} of {name} has no attention by the name self_attn")
    calls = num_attention_calls(model.config)
    if calls != len(having):
        raise ConfigError(
            f"{option}: {name} calls attention {calls} times in {len(having)} layers, must be once in each"
        )


def check_can_be_cut(model: PreTrainedModel, option: str) -> None:
    """Raises ConfigError unless the model is an embedding, layers, a norm and a head, and nothing else has weights.

    Args:
        model: the whole model. Its tensors may be on the meta device. They are not used.
        option: ``--pipeline`` or ``--tensor``, which asks for it.
    """
    name, base = type(model).__name__, model.base_model
    with_weights = {child for child, module in base.named_children() if any(True for _ in module.parameters())}
    parts = {"embed_tokens", "layers", norm_of(base)}
    outside = {child for child, _ in model.named_children()} - {model.base_model_prefix, "lm_head"}
    own = [key for module in (model, base) for key, _ in module.named_parameters(recurse=False)]
    if base is model or with_weights != parts or outside or own or not isinstance(base.layers, nn.ModuleList):
        beside = ", ".join(sorted(with_weights - parts | outside | set(own))) or "no list of layers"
        raise ConfigError(
            f"{option}: {name} cannot be cut into stages of an embedding, layers, a norm and a head: {beside}"
        )
    problem = _not_in_stages(model) if option == "--pipeline" else None
    if problem is not None:
        raise ConfigError(f"--pipeline: {name} cannot be cut into stages: {problem}")


def _not_in_stages(model: PreTrainedModel) -> str | None:
    """What the stages of the model would need of each other but rows; None if there is nothing."""
    if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        return "layers take keys of earlier ones (num_kv_shared_layers), which may be on another stage"
    return _beside_layers(model)


class _Reached(Exception):
    """The first layer was called."""


def _beside_layers(model: PreTrainedModel) -> str | None:
    """What the model does with its input before the first layer, which later stages would do again; or None."""
    base: Any = copy.copy(model.base_model)
    base._modules = dict(base._modules)
    for name, module in base.named_children():
        if name not in ("embed_tokens", "layers", norm_of(base)):
            here = copy.deepcopy(module).to_empty(device="cpu")
            base._modules[name] = here
            for one in here.modules():
                base._init_weights(one)
    rows = torch.zeros(1, 2, base.config.hidden_size)

    def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args[0] if args else kwargs["hidden_states"])

    hook = base.layers[0].register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with torch.no_grad():
            base(inputs_embeds=rows, use_cache=False)
    except _Reached as found:
        return None if found.args[0] is rows else "it changes its input before the first layer"
    except Exception as error:
        return f"it does not run its layers on rows that it is given ({error})"
    finally:
        hook.remove()
    return "its layers are not called"


def keep(model: PreTrainedModel, layers: Sequence[int], *, first: bool, last: bool) -> None:
    """Drops all weights of the model but those of these layers, and at its ends the embedding, or norm and head.

    Tied weights stay at both ends. The dropped modules are gone, and names stay.
    """
    base: Any = model.base_model
    kept = {str(layer) for layer in layers}
    for name in [name for name in base.layers._modules if name not in kept]:
        del base.layers._modules[name]
    tied = bool(model.all_tied_weights_keys)
    if not (first or (last and tied)):
        base.embed_tokens = None
    if not last:
        setattr(base, norm_of(base), nn.Identity())
        model.lm_head = None
    if not (last and (tied or first)):
        model._tied_weights_keys, model.all_tied_weights_keys = None, {}


class Chunk(nn.Module):
    """Consecutive layers of a stage, called like the base model of transformers. It shares the stage's modules."""

    def __init__(self, model: PreTrainedModel, layers: range, *, last: bool) -> None:
        super().__init__()
        base: Any = copy.copy(model.base_model)
        base._modules = dict(base._modules)
        if not last:
            setattr(base, norm_of(base), nn.Identity())
        base.layers = nn.ModuleList(base.layers._modules[str(layer)] for layer in layers)
        base.config = config_of(base.config, layers)
        self.layers = base

    def __getattr__(self, name: str) -> Any:
        """What a head asks of its base model, such as a figure of the configuration."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layers"), name)

    def forward(self, **inputs: Any) -> Any:
        """Runs the layers, and takes part in the steps that a deeper stage has. ``plan`` is that of `Ticks`."""
        outputs = self.layers(**inputs)
        outputs.last_hidden_state = inputs["plan"].pad(outputs.last_hidden_state)
        return outputs


def config_of(config: PreTrainedConfig, layers: range) -> PreTrainedConfig:
    """The configuration of a model that has these layers alone."""
    found = copy.deepcopy(config)
    found.num_hidden_layers = len(layers)
    kinds = kinds_of(config)[layers.start : layers.stop]
    if kinds_of(found) != kinds:
        found.layer_types = kinds
    return found


def with_head(model: PreTrainedModel, chunk: Chunk) -> nn.Module:
    """The model of transformers with the chunk in the place of its base model: it returns logits."""
    whole = copy.copy(model)
    whole._modules = dict(whole._modules)
    setattr(whole, model.base_model_prefix, chunk)
    whole.config = chunk.layers.config
    return whole


def common_scores(model: PreTrainedModel, option: str) -> tuple[float, float]:
    """Scale and softcap of all attention layers of the whole model.

    Raises:
        ConfigError: they differ. The message names the option.
    """
    config = model.config.get_text_config()
    default = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) ** -0.5
    layers: Any = model.base_model.layers
    scales = {getattr(layers[number].self_attn, "scaling", default) for number in attention_layers(model.config)}
    if len(scales) != 1:
        raise ConfigError(f"{option}: layers of {type(model).__name__} differ in their scale: {sorted(scales)}")
    return float(scales.pop()), float(getattr(config, "attn_logit_softcapping", None) or 0.0)
