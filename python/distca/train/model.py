"""The model: made, its attention layers understood, wrapped for data-parallel training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from distca.heads import Heads
from distca.integrations import hf
from distca.train.config import VOCABULARY, ConfigError, TrainConfig


def build_model(config: TrainConfig) -> PreTrainedModel:
    """A Llama with random weights, the same on every rank, whose attention layers take a plan."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.hidden,
            intermediate_size=-(-config.hidden * 8 // 3 // 32) * 32,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.tokens_per_step,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=hf.NAME,
        )
    )
    return model.to(config.torch_dtype).train()


def heads_of(shape: PreTrainedConfig, dtype: torch.dtype) -> Heads:
    """The head shape of the model's attention layers."""
    q = shape.num_attention_heads
    kv = getattr(shape, "num_key_value_heads", None) or q
    return Heads(q=q, kv=kv, dim=getattr(shape, "head_dim", None) or shape.hidden_size // q, dtype=dtype)


def windows_of(shape: PreTrainedConfig) -> list[int | None]:
    """The sliding window of every layer; None for a layer whose rows see all of their document before them."""
    window = getattr(shape, "sliding_window", None)
    kinds = getattr(shape, "layer_types", None)
    if kinds is None:
        return [window] * shape.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    for layer, kind in enumerate(kinds):
        if kind not in windows:
            raise ConfigError(f"layer {layer} of the model is of type {kind}, must be one of {', '.join(windows)}")
    return [windows[kind] for kind in kinds]


def wrap(model: PreTrainedModel, config: TrainConfig) -> torch.nn.Module:
    """The model as the trainer calls it: layers compiled where asked for, gradients averaged over the ranks.

    Layers are compiled one by one, which share their code and so their graph: a layer of Llama is one graph, attention
    included. Around them transformers prepares masks in Python, where a compiler has nothing to gain.
    """
    if config.compile:
        for layer in _layers(model):
            layer.compile()
    if not config.fsdp:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder layers: the one list of modules that is as long as the configuration says."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {num_layers} layers, which --fsdp and --compile need")
