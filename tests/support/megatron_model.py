"""A small GPT of Megatron-core for CPU ranks, its data, and `forward_step`: what `megatron_runs` trains."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention

from distca.integrations.megatron import use_distca

ROWS, HIDDEN, VOCABULARY = 240, 32, 64
BREAK = 2
#: [micro-batch][data rank modulo 2]: ROWS tokens each, unequal attention.
DOCUMENTS = [
    [[240], [24] * 10],
    [[100, 140], [120, 120]],
    [[10] * 24, [230, 10]],
    [[48] * 5, [100, 140]],
]


class Case(NamedTuple):
    """A parallel run of the model, and what its configuration asks for."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 2
    layers: int = 4
    chunks: int = 1
    changes: dict[str, Any] = {}  # of TransformerConfig
    overlap: bool = False  # whether gradients are reduced in backward
    align: bool = False  # whether then all stages but the first reduce after it
    shards: bool = False  # whether the optimizer is distributed
    gathers: bool = False  # whether then parameters are gathered in forward
    tied: bool = False  # whether the output layer has the weight of the embedding
    per_token: bool = False
    kv_heads: int = 2
    ragged: bool = False  # whether micro-batches have different numbers of rows
    joined: bool = False  # whether the last document of each data rank goes on on the next one
    halved: bool = False  # whether layers run in ping-pong
    stock: bool = False  # whether the schedule is Megatron's, with plans of distca
    steps: int = 1
    share: int = 1  # how many data ranks would have the micro-batches of this one
    writes: str = ""  # name of the checkpoint that it writes before step BREAK
    reads: str = ""  # name of the checkpoint with which it goes on at step BREAK

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def alone(self) -> Case:
        """The same model in one process."""
        parallel = ("num_layers_in_", "sequence_parallel", "recompute_", "variable_seq", "deallocate", "expert_model")
        changes = {name: value for name, value in self.changes.items() if not name.startswith(parallel)}
        return self._replace(
            **{"tensor": 1, "pipeline": 1, "data": 1, "chunks": 1, "changes": changes},
            **{"overlap": False, "align": False, "shards": False, "gathers": False, "stock": False, "halved": False},
            **{"share": self.share * self.data, "writes": "", "reads": ""},
        )

    @property
    def begin(self) -> int:
        """The first step."""
        return BREAK if self.reads else 0


class PerDocument(MegatronModule):
    """PyTorch's attention of each document, in the same slot."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self._scale = config.softmax_scale
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size if is_windowed else None
        self.current_max_attn_logits: torch.Tensor | None = None

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> torch.Tensor:
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        outs = []
        for parts in zip(*(each.split(sizes) for each in (q, k, v)), strict=True):
            heads_first = [part.transpose(0, 1) for part in parts]
            mask: dict[str, Any] = {"is_causal": True}
            if self._window is not None:
                mask = {"attn_mask": ~get_sliding_window_causal_mask(len(parts[0]), len(parts[0]), self._window)}
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads_first, enable_gqa=True, scale=self._scale, **mask
            )
            outs.append(out.transpose(0, 1))
            self._find_largest(*parts[:2])
        return torch.cat(outs)

    def _find_largest(self, q: torch.Tensor, k: torch.Tensor) -> None:
        with torch.no_grad():
            scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
            scores *= q.shape[2] ** -0.5 if self._scale is None else self._scale
            hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
            if self._window is not None:
                hidden |= get_sliding_window_causal_mask(len(q), len(q), self._window)
            found = scores.masked_fill(hidden, -torch.inf).amax((1, 2))
            before = self.current_max_attn_logits
            self.current_max_attn_logits = found if before is None else torch.maximum(before, found)


class _Norm(torch.nn.RMSNorm):
    """RMSNorm with the mark by which Megatron reduces its gradient over a tensor group with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def lengths_of(case: Case, step: int, microbatch: int, data_rank: int) -> list[int]:
    """The documents of a micro-batch: other ones in each step."""
    lengths = DOCUMENTS[(step + microbatch) % len(DOCUMENTS)][data_rank % 2]
    return lengths[1:] if case.ragged and len(lengths) > 1 else lengths


def microbatch_of(case: Case, step: int, microbatch: int, data_rank: int) -> dict[str, torch.Tensor]:
    """A micro-batch as a packed data set has it."""
    lengths = lengths_of(case, step, microbatch, data_rank)
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_rank)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, sum(lengths)), generator=generator)
    return {
        "tokens": tokens,
        "labels": labels,
        "mask": (torch.rand(1, sum(lengths), generator=generator) < 0.7 + 0.2 * (data_rank % 2)).float(),
        "of": (step, microbatch),
        "continues": case.joined and data_rank > 0,
        **_documents(lengths),
    }


def _documents(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def joined_microbatch_of(case: Case, step: int, microbatch: int) -> dict[str, torch.Tensor]:
    """The micro-batch of all data ranks in one, with documents that go from one to the next."""
    parts = [microbatch_of(case, step, microbatch, rank) for rank in range(case.share)]
    lengths = lengths_of(case, step, microbatch, 0)
    for rank in range(1, case.share):
        first, *others = lengths_of(case, step, microbatch, rank)
        lengths = [*lengths[:-1], lengths[-1] + first, *others]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in ("tokens", "labels", "mask")}
    return {**whole, **_documents(lengths)}


def fields_of(case: Case) -> dict[str, Any]:
    """What the configuration of a case is made of."""
    changes = dict(case.changes)
    if case.chunks > 1:
        changes["virtual_pipeline_model_parallel_size"] = case.chunks
    return {
        "num_layers": case.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_query_groups": case.kv_heads,
        "ffn_hidden_size": 64,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": case.tensor,
        "pipeline_model_parallel_size": case.pipeline,
        "calculate_per_token_loss": case.per_token,
    } | changes


def configured(case: Case) -> TransformerConfig:
    return TransformerConfig(**fields_of(case))


def models_of(case: Case, config: TransformerConfig, attention: type | None) -> list[Any]:
    """This rank's chunks of the model, in Megatron's DistributedDataParallel."""
    made = []
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for chunk in range(case.chunks):
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
        use_distca(spec)
        if attention is not None:
            spec.submodules.self_attention.submodules.core_attention = attention
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
        position = chunk * case.pipeline + stage
        model = GPTModel(
            config,
            _block(config, spec, chunk if case.chunks > 1 else None),
            VOCABULARY,
            ROWS,
            pre_process=position == 0,
            post_process=position == case.pipeline * case.chunks - 1,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope",
            vp_stage=chunk if case.chunks > 1 else None,
        )
        model.model_type = ModelType.encoder_or_decoder
        _fill(model, case.tensor)
        options = DistributedDataParallelConfig(
            overlap_grad_reduce=case.overlap,
            use_distributed_optimizer=case.shards,
            overlap_param_gather=case.gathers,
            align_param_gather=case.gathers and case.align,
            bucket_size=4000,
        )
        made.append(DistributedDataParallel(config, options, model))
    return made


def _block(config: TransformerConfig, spec: Any, chunk: int | None) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=_Norm)


def _fill(model: GPTModel, tensor_ranks: int) -> None:
    """Fills each parameter of the whole model by its name, so that all ways to cut it compute the same."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if model.share_embeddings_and_output_weights and parts[0] == "output_layer":
            parts = ["embedding", "word_embeddings", "weight"]
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(model.decoder.layers[int(parts[at])].layer_number)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            experts = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
            parts[at] = str(int(parts[at]) + parallel_state.get_expert_model_parallel_rank() * experts)
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= tensor_ranks
        whole = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.2
        with torch.no_grad():
            parameter.copy_(whole if dim is None else whole.chunk(tensor_ranks, dim)[rank])


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """What users write. The only word of distca is `packed_seq_params`."""
    shared = [next(data_iterator)]
    dist.broadcast_object_list(shared, group=parallel_state.get_tensor_model_parallel_group(), group_src=0)
    batch = shared[0] or dict.fromkeys(("tokens", "labels", "mask", "positions"))
    packed = data_iterator.packed_seq_params()
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=packed)

    def loss_func(losses: torch.Tensor) -> Any:
        if not model.config.calculate_per_token_loss:
            return losses.mean(), {"loss": losses.mean().detach(), "tokens": 1}
        loss, tokens = (losses * batch["mask"]).sum(), batch["mask"].sum().int()
        return loss, tokens, {"loss": loss.detach(), "tokens": tokens}

    return output, loss_func
