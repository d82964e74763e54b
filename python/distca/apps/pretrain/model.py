"""The model of a run: Megatron-core's GPTModel with distca's or with Megatron's attention in its slot."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from distca.apps.pretrain.context_parallel import SharedSeqParams, attention_of_shared
from distca.apps.pretrain.options import Options
from distca.apps.pretrain.shapes import Shape
from distca.errors import InvalidArgumentError
from distca.integrations.megatron import use_distca

#: What tensor parallelism of the embedding wants the vocabulary to be a multiple of, for each tensor rank.
_VOCABULARY_MULTIPLE = 128


class PerDocumentAttention(MegatronModule):  # type: ignore[misc]
    """PyTorch's attention of one document after the other, in Megatron's slot.

    Megatron's own attention takes no packed documents without Transformer Engine, and no documents of any length over
    several ranks with it.
    """

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        """Attention of this rank's rows, ``[T, H, D]``."""
        if isinstance(packed_seq_params, SharedSeqParams):
            return attention_of_shared(query, key, value, packed_seq_params.shared, self._scale)
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        outs = []
        for parts in zip(*(each.split(sizes) for each in (query, key, value)), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True, scale=self._scale
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class _RMSNorm(torch.nn.RMSNorm):
    """RMSNorm without Transformer Engine, with the mark by which Megatron reduces its gradient over tensor ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def padded_vocabulary(vocabulary: int, tensor_ranks: int) -> int:
    """The vocabulary with unused tokens at its end, as tensor parallelism wants it."""
    multiple = _VOCABULARY_MULTIPLE * tensor_ranks
    return -(-vocabulary // multiple) * multiple


def chunks_of_model(config: Any, shape: Shape, vocabulary: int, options: Options, *, cuda: bool) -> list[Any]:
    """This process's chunks of the model, in Megatron's DistributedDataParallel.

    Raises:
        InvalidArgumentError: the attention that the options ask for needs a package that is missing.
    """
    if cuda and options.attention == "megatron" and not HAVE_TE:
        raise InvalidArgumentError(
            "--attention (ATTENTION) is megatron, whose attention of packed documents is in Transformer Engine, which "
            "is not installed: pip install transformer-engine[pytorch]"
        )
    torch.manual_seed(options.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=cuda, use_distributed_optimizer=bool(options.distributed_optimizer)
    )
    made = []
    for chunk in range(options.vpp_size):
        virtual = chunk if options.vpp_size > 1 else None
        position = chunk * options.pp_size + parallel_state.get_pipeline_model_parallel_rank()
        model = GPTModel(
            config,
            _block(config, shape, virtual, options, cuda),
            padded_vocabulary(shape.vocabulary or vocabulary, options.tp_size),
            options.tokens_per_rank,
            pre_process=position == 0,
            post_process=position == options.pp_size * options.vpp_size - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_base,
            rope_scaling=shape.rope_scaling is not None,
            rope_scaling_factor=shape.rope_scaling or 8.0,
            vp_stage=virtual,
        )
        model.model_type = ModelType.encoder_or_decoder
        if cuda:
            model = Float16Module(config, model.cuda())
        made.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return made


def _block(config: Any, shape: Shape, virtual: int | None, options: Options, cuda: bool) -> Any:
    with_engine = cuda and HAVE_TE
    if with_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _RMSNorm
        if shape.qk_norm:
            inner = spec.submodules.self_attention.submodules
            inner.q_layernorm = inner.k_layernorm = _RMSNorm
    if options.attention == "distca":
        use_distca(spec)
    elif not with_engine or options.cp_size > 1:
        spec.submodules.self_attention.submodules.core_attention = PerDocumentAttention
    layers = get_num_layers_to_build(config, vp_stage=virtual)
    if with_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules([spec] * layers, layer_norm=TENorm)
    return TransformerBlockSubmodules([spec] * layers, layer_norm=_RMSNorm)


def optimizer_of(chunks: list[Any], options: Options) -> tuple[Any, Any]:
    """Megatron's AdamW over the chunks, and its schedule: warm-up, then a cosine to a tenth of the rate."""
    assert options.lr is not None
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr / 10,
            weight_decay=options.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=options.clip_grad,
            bf16=chunks[0].config.bf16,
            params_dtype=chunks[0].config.params_dtype,
            use_distributed_optimizer=bool(options.distributed_optimizer),
        ),
        chunks,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr / 10,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=options.steps,
        lr_decay_style="cosine",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.steps,
        wd_incr_style="constant",
    )
    return optimizer, schedule
