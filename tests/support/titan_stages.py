"""torchtitan's Llama in two stages on four ranks, in the schedule of ticks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage

import distca
from distca.integrations.torch_pipelining import ScheduleTicks
from distca.integrations.torchtitan import TickStage, heads_of
from distca.pipeline import PipelinePlans, Ticks
from support import titan

ROWS, MICROBATCHES = 200, 3
STAGES = [[0, 1], [2, 3]]
PARTS = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
#: [micro-batch][data rank]
DOCUMENTS = [[[200], [20] * 10], [[50] * 4, [150, 50]], [[10] * 20, [199, 1]]]


def batch(microbatch: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions, each ``[1, ROWS]``."""
    generator = torch.Generator().manual_seed(10 * microbatch + data_rank)
    tokens, labels = torch.randint(0, 2000, (2, 1, ROWS), generator=generator)
    lengths = DOCUMENTS[microbatch][data_rank]
    return tokens, labels, torch.cat([torch.arange(length) for length in lengths])[None]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ROWS


def alone() -> titan.Result:
    """All micro-batches of both data ranks in one process, with torchtitan's own attention in float64."""
    model, loss = titan.own_attention(titan.built(titan.config_of("llama3", "debugmodel", 2))), 0.0
    for microbatch in range(MICROBATCHES):
        for data_rank in range(2):
            tokens, labels, positions = batch(microbatch, data_rank)
            logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
            of_batch = loss_of(logits, labels)
            of_batch.backward()
            loss += of_batch.item()
    return titan.Result(loss, {name: p.grad for name, p in model.named_parameters()})


def of_rank() -> titan.Result:
    """The losses and gradients of a rank's stage, as parts of the sums over all ranks."""
    config = titan.config_of("llama3", "debugmodel", 2)
    titan.replaced(config)
    model, heads = titan.built(config), heads_of(config, torch.float32)
    stage, data_rank = divmod(dist.get_rank(), 2)
    for name in ("tok_embeddings", "norm", "lm_head"):  # as torchtitan cuts a model
        if name not in PARTS[stage]:
            setattr(model, name, None)
    del model.layers[str(1 - stage)]
    groups = [dist.new_group([ranks[r] for ranks in STAGES]) for r in range(2)]
    hidden = torch.empty(1, ROWS, config.dim, requires_grad=True)
    example = torch.zeros(1, ROWS, dtype=torch.int64)
    logits = torch.empty(1, ROWS, config.vocab_size, requires_grad=True)
    with distca.init(max_tokens=ROWS, heads=heads, timeout=60.0) as context:
        made = PipelineStage(
            TickStage(model, context),
            stage,
            2,
            torch.device("cpu"),
            input_args=hidden if stage else example,
            output_args=logits if stage else hidden,
            group=groups[data_rank],
        )
        layouts = [distca.Layout.from_documents(lengths) for lengths in DOCUMENTS]
        plans = PipelinePlans(layouts, heads, stages=STAGES, layers=1, context=context, min_rows=8)
        schedule = ScheduleTicks([made], MICROBATCHES, loss_fn=loss_of, scale_grads=False)
        tokens, labels, positions = (
            torch.cat(parts) for parts in zip(*(batch(n, data_rank) for n in range(MICROBATCHES)), strict=True)
        )
        losses: list[torch.Tensor] = []
        given = ((), {"target": labels, "losses": losses}) if stage else ((tokens,), {})
        schedule.step(*given[0], positions=positions, ticks=Ticks(plans, context=context), **given[1])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return titan.Result(sum(loss.item() for loss in losses), grads)
