"""Shapes of models, and what Megatron-core's configuration says of them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distca.apps.pretrain.options import Options
from distca.errors import InvalidArgumentError


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder with RoPE, RMSNorm and a gated MLP.

    Attributes:
        layers, hidden, inner: number of layers, size of the residual stream, size inside the MLP.
        heads, kv_heads, head_dim: query heads, key/value heads, and their size.
        vocabulary: number of tokens; None takes the tokenizer's.
        rope_base: the base of RoPE's frequencies.
        rope_scaling: factor by which Llama 3.1 stretches low frequencies; None for no stretching.
        qk_norm: whether queries and keys are normalised (Qwen3).
        norm_eps: epsilon of the norms.
        tied: whether embedding and head have the same weights.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int | None
    rope_base: float
    rope_scaling: float | None = None
    qk_norm: bool = False
    norm_eps: float = 1e-5
    tied: bool = False

    def flops(self, positions: torch.Tensor, vocabulary: int) -> float:
        """Floating-point operations of forward and backward of rows at these positions, without recomputation.

        A causal row sees itself and the rows before it.
        """
        width = self.heads * self.head_dim
        layer = self.hidden * (2 * width + 2 * self.kv_heads * self.head_dim + 3 * self.inner)
        dense = 6.0 * positions.numel() * (self.layers * layer + self.hidden * vocabulary)
        return dense + 12.0 * self.layers * width * float((positions.double() + 1).sum())


#: What Megatron's RoPE of Llama 3.1 has besides its factor.
_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
#: The sources are the config.json files of the released models of these names: Llama 3.1 8B, CodeLlama 34B, Qwen3 8B.
SHAPES = {
    "tiny": Shape(4, 128, 256, 8, 4, 16, None, 10000.0),
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 500000.0, rope_scaling=8.0),
    "llama-34b": Shape(48, 8192, 22016, 64, 8, 128, 32016, 1000000.0),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, 1000000.0, qk_norm=True, norm_eps=1e-6),
}


def shape_of(options: Options) -> Shape:
    """The shape that the options ask for.

    Raises:
        InvalidArgumentError: there is no such model, or its heads or layers cannot be shared as asked.
    """
    shape = SHAPES.get(options.model) or _read(Path(options.model))
    if options.layers:
        shape = dataclasses.replace(shape, layers=options.layers)
    for name, heads in (("query", shape.heads), ("key/value", shape.kv_heads)):
        if heads % options.tp_size:
            raise InvalidArgumentError(
                f"--tp-size (TP_SIZE) is {options.tp_size}, must divide the {heads} {name} heads of {options.model}"
            )
    if shape.layers % (options.pp_size * options.vpp_size):
        raise InvalidArgumentError(
            f"--pp-size (PP_SIZE) is {options.pp_size}, times --vpp-size {options.vpp_size} must divide the "
            f"{shape.layers} layers of {options.model}"
        )
    return shape


def _read(path: Path) -> Shape:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidArgumentError(
            f"--model (MODEL) is {path}, must be one of {', '.join(SHAPES)}, or a config.json, or a folder with one"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["model_type"] not in ("llama", "qwen3"):
            raise ValueError(f"model_type is {found['model_type']!r}; llama and qwen3 are allowed")
        for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if found.get(name):
                raise ValueError(f"{name} is {found[name]!r}, must be false")
        if found.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act is {found['hidden_act']!r}; silu is allowed")
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"  # the latter in older versions of transformers
        if kind not in ("default", "llama3"):
            raise ValueError(f"rope_type is {kind!r}; default and llama3 are allowed")
        for name, of_megatron in _LLAMA3_ROPE.items() if kind == "llama3" else ():
            if float(rope[name]) != of_megatron:
                raise ValueError(f"{name} is {rope[name]!r}, must be {of_megatron}, which is Megatron's")
        heads = int(found["num_attention_heads"])
        return Shape(
            layers=int(found["num_hidden_layers"]),
            hidden=int(found["hidden_size"]),
            inner=int(found["intermediate_size"]),
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(found.get("head_dim") or int(found["hidden_size"]) // heads),
            vocabulary=int(found["vocab_size"]),
            rope_base=float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
            rope_scaling=float(rope["factor"]) if kind == "llama3" else None,
            qk_norm=found["model_type"] == "qwen3",
            norm_eps=float(found["rms_norm_eps"]),
            tied=bool(found.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InvalidArgumentError(f"--model (MODEL) is {path}, which cannot be read: {what}") from error


def configuration(shape: Shape, options: Options, *, cuda: bool) -> Any:
    """Megatron-core's TransformerConfig of a model."""
    from megatron.core.transformer import TransformerConfig

    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.inner,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=cuda,
        params_dtype=torch.bfloat16 if cuda else torch.float32,
        pipeline_dtype=torch.bfloat16 if cuda else torch.float32,
        use_cpu_initialization=not cuda,
        tensor_model_parallel_size=options.tp_size,
        pipeline_model_parallel_size=options.pp_size,
        virtual_pipeline_model_parallel_size=options.vpp_size if options.vpp_size > 1 else None,
        # In one batch of two stages, Megatron's interleaved schedule would mix up tensors of forward and of backward.
        batch_p2p_comm=options.vpp_size == 1,
        overlap_p2p_comm=options.vpp_size > 1,
        sequence_parallel=options.sequence_parallel,
        calculate_per_token_loss=True,
        variable_seq_lengths=options.attention == "megatron" and options.cp_size > 1,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it where lengths vary, without experts too
        **recompute[options.recompute],
    )
