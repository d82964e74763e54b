"""The model of a run: it is made, its shape is checked, and it is wrapped for data-parallel training."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig
from distca.apps.train.presets import PRESETS
from distca.apps.train.weights import MatricesOnMeta, make_weights
from distca.checkpoint import save_core_attention
from distca.errors import InvalidArgumentError
from distca.integrations import hf
from distca.pingpong.ping_pong import PingPong
from distca.planner.layout import Layout

_MISTAKES = (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError)
"""What transformers raises for a configuration that is none of its own."""


def build_model(config: TrainConfig, vocabulary: int) -> PreTrainedModel:
    """Makes the model, the same on every rank. Its attention layers take a plan.

    Weights are random unless `--model` names a checkpoint. With `--fsdp` only rank 0 has them; the tensors of other
    ranks are on the meta device until `wrap`.

    Args:
        config: the options of the run.
        vocabulary: number of tokens that the model must know.

    Raises:
        ConfigError: transformers cannot make the model, or a plan cannot express it.
    """
    shape, checkpoint = model_config(config, vocabulary)
    model = without_weights(config, shape) if _takes_weights(config) else with_weights(config, shape, checkpoint)
    check_plans(model, config)
    return model


def check_plans(model: PreTrainedModel, config: TrainConfig) -> None:
    """Checks that plans can express the model. Its tensors may be on the meta device.

    Raises:
        InvalidArgumentError: they cannot.
        ConfigError: a row of the model sees the next one, which it should predict.
    """
    if hf.mask_of(model) == "full":
        raise ConfigError(
            f"--model is {config.model}, whose rows see those after them; distca train makes a row predict the next one"
        )
    ranks = config.data_ranks * config.pipeline
    hf.check_model(model, ranks, Layout.from_documents([[1]] * ranks))


def without_weights(config: TrainConfig, shape: PreTrainedConfig) -> PreTrainedModel:
    """The model in training mode, its tensors on the meta device.

    Raises:
        ConfigError: transformers cannot make the model.
    """
    with _mistakes_told(config), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, attn_implementation=hf.NAME)
    return _for_training(model, config)


def with_weights(
    config: TrainConfig,
    shape: PreTrainedConfig,
    checkpoint: Path | None,
    cut: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """The model in training mode, with random weights or those of a checkpoint.

    Args:
        config: the options of the run.
        shape: the model's configuration.
        checkpoint: the folder of its weights, or None.
        cut: drops parts of the model that this process does not need. Their weights are neither made nor loaded.

    Raises:
        ConfigError: transformers cannot make the model, or the checkpoint lacks weights of it.
    """
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    with _mistakes_told(config):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)]

        class Part(kind):  # type: ignore[misc, valid-type]
            def __init__(self, config: PreTrainedConfig) -> None:
                super().__init__(config)
                if cut is not None:
                    cut(self)
                    self._keys_to_ignore_on_load_unexpected = {""}  # all of them: the other parts have these weights

        Part.__name__ = kind.__name__
        model: PreTrainedModel
        if checkpoint is None:
            with MatricesOnMeta():
                model = Part._from_config(shape, attn_implementation=hf.NAME)
            make_weights(model, config.seed)
        else:
            model, found = Part.from_pretrained(
                checkpoint,
                config=shape,
                dtype=config.weights_dtype,
                attn_implementation=hf.NAME,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are told below
                output_loading_info=True,
            )
            _check_loaded(config, found)
            torch.manual_seed(config.seed)
    return _for_training(model, config)


def _for_training(model: PreTrainedModel, config: TrainConfig) -> PreTrainedModel:
    for parameter in model.parameters():  # not buffers: rotary frequencies would lose the positions of long documents
        parameter.data = parameter.data.to(config.weights_dtype)
    return model.train()


def _check_loaded(config: TrainConfig, found: dict[str, Any]) -> None:
    """Raises ConfigError if transformers has made weights at random that the checkpoint should have."""
    others = [
        f"{name}, of shape {tuple(saved)} instead of {tuple(made)}" for name, saved, made in found["mismatched_keys"]
    ]
    for what, names in (("lacks weights", found["missing_keys"]), ("has weights of other shapes", others)):
        if names:
            first, *more = sorted(names)
            and_more = f" and {len(more)} more" if more else ""
            raise ConfigError(
                f"--model is {config.model}, whose checkpoint {what}: {first}{and_more}; restore its files"
            )


@contextmanager
def _mistakes_told(config: TrainConfig) -> Iterator[None]:
    """Raises ConfigError for what transformers cannot make."""
    try:
        yield
    except InvalidArgumentError as error:
        raise ConfigError(f"--model is {config.model}: {error}") from error
    except SafetensorError as error:
        raise ConfigError(
            f"--model is {config.model}, whose weights are damaged: {error}; restore its files"
        ) from error
    except _MISTAKES as error:
        raise ConfigError(
            f"--model is {config.model}, which is not a language model of transformers: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _takes_weights(config: TrainConfig) -> bool:
    """Whether this rank gets its part of the weights from rank 0."""
    return config.fsdp and dist.get_rank() != 0


def model_config(config: TrainConfig, vocabulary: int) -> tuple[PreTrainedConfig, Path | None]:
    """The model's configuration, and the folder of its weights or None."""
    checkpoint = None
    if config.model is None:
        shape: PreTrainedConfig = _tiny_llama(config, vocabulary)
    elif config.model in PRESETS:
        shape = LlamaConfig(**PRESETS[config.model])
    else:
        shape, checkpoint = _read_config(config.model)
    text = shape.get_text_config()
    if not hasattr(text, "vocab_size"):
        raise ConfigError(f"--model is {config.model}, a {shape.model_type}, which is not a language model")
    if text.num_hidden_layers < 1:
        raise ConfigError(
            f"--model is {config.model}, whose num_hidden_layers is {text.num_hidden_layers}, must be at least 1"
        )
    if config.model is not None and config.layers is not None:
        _keep_layers(text, config.layers)
    if vocabulary > text.vocab_size:
        tokens = f"--tokenizer {config.tokenizer}" if config.tokenizer is not None else "bytes, the default tokens"
        raise ConfigError(
            f"--model is {config.model}, whose vocabulary of {text.vocab_size} is too small for {tokens} ({vocabulary})"
        )
    return shape, checkpoint


def check_positions(shape: PreTrainedConfig, config: TrainConfig, longest_document: int) -> None:
    """Raises ConfigError if a document may be longer than the positions that the model was made for."""
    positions = getattr(shape.get_text_config(), "max_position_embeddings", None)
    longest = min(longest_document, config.tokens_per_rank if config.homes == "whole" else config.tokens_per_batch)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"--model is {config.model}, made for {positions} positions, but a step may hold {longest} tokens of a "
            "document: lower --tokens-per-rank or --doc-scale"
        )


def _tiny_llama(config: TrainConfig, vocabulary: int) -> LlamaConfig:
    hidden, heads = config.tiny("hidden"), config.tiny("heads")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=-(-hidden * 8 // 3 // 32) * 32,
        num_hidden_layers=config.tiny("layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.tiny("kv_heads"),
        head_dim=hidden // heads,
        max_position_embeddings=config.tokens_per_batch,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def _read_config(model: str) -> tuple[PreTrainedConfig, Path | None]:
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--model is {model}, must be one of {', '.join(PRESETS)}, a config.json, or a folder with one; nothing is "
            "downloaded: fetch a model first and give its folder"
        )
    shape = read_config(file, f"--model is {model}")
    return shape, path if path.is_dir() and any(path.glob("*.safetensors")) else None


def read_config(file: Path, what: str) -> PreTrainedConfig:
    """The configuration in a config.json. Raises ConfigError, which begins with `what` it is of."""
    try:
        shape: PreTrainedConfig = AutoConfig.from_pretrained(str(file), local_files_only=True)
    except _MISTAKES as error:
        raise ConfigError(f"{what}, whose config.json transformers cannot read: {_one_line(error)}") from error
    return shape


def _keep_layers(shape: PreTrainedConfig, layers: int) -> None:
    if layers > shape.num_hidden_layers:
        raise ConfigError(f"--layers is {layers}, must be at most the model's {shape.num_hidden_layers}")
    shape.num_hidden_layers = layers
    if getattr(shape, "layer_types", None) is not None:
        shape.layer_types = shape.layer_types[:layers]


def wrap(model: PreTrainedModel, config: TrainConfig) -> torch.nn.Module:
    """The model as the trainer calls it: layers compiled if asked for, gradients averaged over the ranks.

    Layers are compiled one by one. They share their code and therefore their graph: a layer of Llama is one graph,
    attention included. Around the layers transformers prepares masks in Python, where a compiler gains nothing.
    """
    if config.checkpoint_activations:
        checkpoint_activations(model)
    if config.compile:
        for layer in _layers(model):
            layer.compile()
    if config.fsdp:
        _shard(model, config)
        return PingPong(model) if config.ping_pong else model
    # Buffers of decoders, such as rotary frequencies, stay the same on all ranks. Gloo takes 4 ms to send them.
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in parameters
    unsent: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    over_ranks = DistributedDataParallel(PingPong(model) if config.ping_pong else model, **unsent)
    wrapped = _with_lasting_buckets(over_ranks)
    if config.master_weights:
        cast = torch.autocast("cpu", config.torch_dtype)
        wrapped.forward = cast(wrapped.forward)  # type: ignore[method-assign]
    return wrapped


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Turns activation checkpointing on. It does not run attention again, whose steps are those of all ranks."""
    # Versions of transformers that have the newer name deprecate the older one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False, "context_fn": save_core_attention})
    except ValueError as error:
        raise ConfigError(f"--checkpoint-activations: {error}") from error


def _shard(model: PreTrainedModel, config: TrainConfig) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, for runs with --fsdp alone

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if config.master_weights:
        policy = MixedPrecisionPolicy(param_dtype=config.torch_dtype, reduce_dtype=torch.float32)
    weights, beside = (model.state_dict(), _beside_weights(model)) if dist.get_rank() == 0 else ({}, {})
    model.to("meta")
    model.tie_weights()
    _check_not_shared(model)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.tie_weights()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    _take_beside_weights(model, beside)


def _check_not_shared(model: PreTrainedModel) -> None:
    """Raises ConfigError if layers have weights in common (Zamba): FSDP2 can shard them in one layer only."""
    layer_of: dict[torch.nn.Parameter, int] = {}
    for number, layer in enumerate(_layers(model)):
        for name, weight in layer.named_parameters():
            if layer_of.setdefault(weight, number) != number:
                raise ConfigError(
                    f"--fsdp is True, must be left out: layers {layer_of[weight]} and {number} of "
                    f"{type(model).__name__} share the weight {name}, and FSDP2 shards each layer by itself"
                )


_Beside = dict[tuple[str, str], torch.Tensor]


def _beside_weights(model: PreTrainedModel) -> _Beside:
    """Tensors that no state dict has, such as rotary frequencies, by module and name."""
    found: _Beside = {}
    for name, module in model.named_modules():
        buffers = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        for key, value in (buffers | vars(module)).items():
            if isinstance(value, torch.Tensor):
                found[name, key] = value
    return found


def _take_beside_weights(model: PreTrainedModel, beside: _Beside) -> None:
    """Takes these tensors from rank 0, and its random state, from which making the weights has drawn."""
    shared: list[Any] = [beside, torch.get_rng_state()]
    dist.broadcast_object_list(shared, src=0)
    for (module, name), value in shared[0].items():
        setattr(model.get_submodule(module), name, value)
    torch.set_rng_state(shared[1])


def _with_lasting_buckets(model: DistributedDataParallel) -> DistributedDataParallel:
    """Runs a backward that leaves no gradients, and returns the model.

    DDP arranges gradients in other buckets after the first backward of a process. The place of a gradient in its bucket
    decides in which order three or more ranks add it. Without this backward a resumed run would therefore differ in the
    last bits.
    """
    module = model.module
    module.forward = lambda: torch.stack([one.sum() for one in module.parameters() if one.requires_grad]).sum()
    try:
        model().backward()
    finally:
        del module.forward
    model.zero_grad()
    return model


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder layers: the only list of modules that is as long as the configuration says."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {num_layers} layers, which --fsdp and --compile need")
