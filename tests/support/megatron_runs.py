"""A small GPT of Megatron-core that trains on CPU ranks: with distca in its slot, or with PyTorch's attention in it."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule

import distca
from distca.integrations.megatron import DistcaPackedSeqParams, PlannedBatches, init, tick_schedule, use_distca
from distca.integrations.megatron_on_cpu import cuda_is_cpu

ROWS, HIDDEN, VOCABULARY = 240, 32, 64
#: [micro-batch][data rank]: ROWS tokens each, unequal attention.
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
    per_token: bool = False
    kv_heads: int = 2
    ragged: bool = False  # whether micro-batches have different numbers of rows
    stock: bool = False  # whether the schedule is Megatron's, with plans of distca
    steps: int = 1

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
            **{"overlap": False, "align": False, "shards": False, "stock": False},
        )


class Result(NamedTuple):
    """The losses of the steps, the norms of their gradients, and the loss of an evaluation in front of them."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    steps_of_attention: int = 0
    imbalance: float = 1.0


class _PerDocument(MegatronModule):
    """PyTorch's attention of each document, in the same slot."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(self, q: Any, k: Any, v: Any, *_: Any, packed_seq_params: Any, **__: Any) -> torch.Tensor:
        sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
        outs = []
        for parts in zip(*(each.split(sizes) for each in (q, k, v)), strict=True):
            heads_first = [part.transpose(0, 1) for part in parts]
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)


class _Norm(torch.nn.RMSNorm):
    """RMSNorm with the mark by which Megatron reduces its gradient over a tensor group with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def lengths_of(case: Case, step: int, microbatch: int, data_rank: int) -> list[int]:
    """The documents of a micro-batch: other ones in each step."""
    lengths = DOCUMENTS[(step + microbatch) % len(DOCUMENTS)][data_rank]
    return lengths[1:] if case.ragged and len(lengths) > 1 else lengths


def microbatch_of(case: Case, step: int, microbatch: int, data_rank: int) -> dict[str, torch.Tensor]:
    """A micro-batch as a packed data set has it."""
    lengths = lengths_of(case, step, microbatch, data_rank)
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + data_rank)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, sum(lengths)), generator=generator)
    return {
        "tokens": tokens,
        "labels": labels,
        "mask": (torch.rand(1, sum(lengths), generator=generator) < 0.7 + 0.2 * data_rank).float(),
        "of": (step, microbatch),
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def configured(case: Case) -> TransformerConfig:
    changes = dict(case.changes)
    if case.chunks > 1:
        changes["virtual_pipeline_model_parallel_size"] = case.chunks
    return TransformerConfig(
        **{
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
        }
        | changes
    )


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
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=chunk if case.chunks > 1 else None,
        )
        model.model_type = ModelType.encoder_or_decoder
        _fill(model, case.tensor)
        options = DistributedDataParallelConfig(
            overlap_grad_reduce=case.overlap, use_distributed_optimizer=case.shards, bucket_size=4000
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


class _Local:
    """A data iterator for the schedule of Megatron: for PyTorch's attention, or with plans for `ranks`."""

    def __init__(self, case: Case, batches: Sequence[Any], context: distca.Context | None = None) -> None:
        self._case, self._batches, self._context = case, iter(batches), context

    def __next__(self) -> Any:
        self._batch = next(self._batches)
        return self._batch

    def packed_seq_params(self) -> PackedSeqParams:
        ends = self._batch["cu_seqlens"]
        longest = int(ends.diff().max())
        known = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        if self._context is None:
            return PackedSeqParams("thd", **known)
        step, microbatch = self._batch["of"]
        lengths = [lengths_of(self._case, step, microbatch, rank) for rank in range(self._case.data)]
        layout = distca.Layout.from_documents(lengths)
        plan = distca.plan(layout, self._context.heads, context=self._context, tolerance=0.02, min_rows=8)
        return DistcaPackedSeqParams("thd", **known, plan=plan, context=self._context)


def run(case: Case, data_ranks: int | None = None) -> Result:
    """Evaluates once and trains for the steps of the case. With `data_ranks` this process computes what so many do."""
    with cuda_is_cpu():
        expert = case.changes.get("expert_model_parallel_size", 1)
        parallel_state.initialize_model_parallel(
            case.tensor,
            case.pipeline,
            case.chunks if case.chunks > 1 else None,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1 if expert > 1 else None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        result = _run(case, data_ranks)
        gc.collect()
        dist.barrier()
        parallel_state.destroy_model_parallel()
        return result


def _run(case: Case, data_ranks: int | None) -> Result:
    config = configured(case)
    alone = data_ranks is not None
    models = models_of(case, config, _PerDocument if alone else None)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            # A large eps, because Adam otherwise makes as much of an error of a tiny gradient as of the gradient.
            optimizer="adam",
            lr=0.01,
            adam_eps=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=case.shards,
        ),
        models,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [model.no_sync for model in models]
    if len(models) == 1:
        [config.no_sync_func] = config.no_sync_func
    if case.align:
        config.grad_sync_func = [model.start_grad_sync for model in models]
    ranks = range(data_ranks) if data_ranks is not None else [parallel_state.get_data_parallel_rank()]
    count = len(DOCUMENTS) * len(ranks)
    steps_and_numbers = [(step, number) for step in range(-1, case.steps) for number in range(len(DOCUMENTS))]
    data = [microbatch_of(case, step, number, rank) for step, number in steps_and_numbers for rank in ranks]
    context = None if alone else init(config, max_tokens=ROWS, timeout=30)
    schedule: Any = tick_schedule
    if context is None or case.stock:
        schedule = get_forward_backward_func()
        evaluation, batches = _Local(case, data, context), _Local(case, data[count:], context)
    else:
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), case.pipeline
        reads = parallel_state.get_tensor_model_parallel_rank() == 0 and stage in (0, stages - 1)
        options: dict[str, Any] = {"context": context, "num_microbatches": count, "tolerance": 0.02, "min_rows": 8}
        evaluation = PlannedBatches(iter(data[:count]) if reads else None, config, forward_only=True, **options)
        batches = PlannedBatches(iter(data[count:]) if reads else None, config, **options)
    common = {
        "forward_step_func": forward_step,
        "num_microbatches": count,
        "seq_length": ROWS,
        "micro_batch_size": 1,
    }
    losses, norms, imbalance = [], [], 1.0
    with torch.no_grad():
        kept = schedule(data_iterator=evaluation, model=models, forward_only=True, **common)
    evaluated = _mean(kept, case)
    for _ in range(case.steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        kept = schedule(data_iterator=batches, model=models, forward_only=False, **common)
        _, norm, _ = optimizer.step()
        losses.append(_mean(kept, case))
        norms.append(float(norm))
        if isinstance(batches, PlannedBatches):
            imbalance = max(imbalance, batches.ticks.plans.stats.imbalance_after)
    taken = 0
    for each in (batches, evaluation):
        if isinstance(each, PlannedBatches):
            each.close()
    if context is not None:
        taken = context.step
        dist.barrier()
        context.close()
    return Result(losses, norms, evaluated, taken, imbalance)


def _mean(kept: list[dict[str, Any]], case: Case) -> float:
    """The mean loss over all micro-batches of all data ranks, on all ranks."""
    mine = torch.tensor([[float(each["loss"]), float(each["tokens"])] for each in kept], dtype=torch.float64)
    totals = mine.sum(0) if kept else torch.zeros(2, dtype=torch.float64)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def train(model: Any, forward_step_func: Any, **given: Any) -> list[Any]:
    """An iteration of `tick_schedule`."""
    return tick_schedule(forward_step_func=forward_step_func, model=model, **given)


def run_all(cases: Sequence[Case]) -> list[Result]:
    return [run(case) for case in cases]


def run_all_alone(cases: Sequence[Case]) -> list[Result]:
    """All models in this one process, with PyTorch's attention and Megatron's schedule."""
    alone: dict[str, Result] = {}
    for case in cases:
        if (key := f"{case.alone} {case.data}") not in alone:
            alone[key] = run(case.alone, case.data)
    return [alone[f"{case.alone} {case.data}"] for case in cases]


def assert_as_alone(cases: Sequence[Case], of_ranks: list[list[Result]], alone: list[Result]) -> None:
    """Asserts that each case has the losses and the norms of gradients that one process has."""
    for number, case in enumerate(cases):
        results, expected = [of_rank[number] for of_rank in of_ranks], alone[number]
        exact = 1e-6 if case.tensor == 1 else 1e-5
        for result in results:
            assert result.evaluated == pytest.approx(expected.evaluated, rel=exact), case
            assert result.losses[0] == pytest.approx(expected.losses[0], rel=exact), case
            assert result.norms[0] == pytest.approx(expected.norms[0], rel=exact), case
            assert result.losses == pytest.approx(expected.losses, rel=1e-5), case
            assert result.norms == pytest.approx(expected.norms, rel=1e-4), case
            assert result.imbalance < 1.05, case
        assert len({result.steps_of_attention for result in results}) == 1, case
        assert len(expected.losses) == case.steps and expected.losses[-1] != expected.evaluated, case
