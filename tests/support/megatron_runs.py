"""Trains the small GPT of `megatron_model` on CPU ranks: with distca in its slot, or with PyTorch's attention in it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.qk_clip import clip_qk
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers

import distca
from distca.integrations.megatron import DistcaPackedSeqParams, PlannedBatches, init, tick_schedule
from distca.integrations.megatron_config import asks_for_max_logits
from distca.integrations.megatron_on_cpu import cuda_is_cpu
from support import megatron_checkpoints as checkpoints
from support.megatron_model import (
    BREAK,
    DOCUMENTS,
    ROWS,
    Case,
    PerDocument,
    configured,
    forward_step,
    joined_microbatch_of,
    lengths_of,
    microbatch_of,
    models_of,
)
from support.process_groups import leave_all_groups


class Result(NamedTuple):
    """The losses of the steps, the norms of their gradients, and the loss of an evaluation in front of them; and the
    largest logits that Megatron has found after each step, if it was asked for them.
    """

    losses: list[float]
    norms: list[float]
    evaluated: float
    largest: list[float]
    steps_of_attention: int = 0
    imbalance: float = 1.0


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
        windows: list[int | None] = [None]
        if "window_size" in self._case.changes:
            windows.append(1 + self._case.changes["window_size"][0])
        options: dict[str, Any] = {"context": self._context, "tolerance": 0.02, "min_rows": 8}
        plan = distca.plans(layout, self._context.heads, windows=windows, **options)
        return DistcaPackedSeqParams("thd", **known, plan=plan, context=self._context)


def run(case: Case, folder: Path | None = None, *, alone: bool = False) -> Result:
    """Evaluates once and trains for the steps of the case.

    Args:
        case: the run.
        folder: where checkpoints are.
        alone: whether the model has PyTorch's attention and Megatron's schedule, in one process.
    """
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
        result = _run(case, folder, alone)
        gc.collect()
        assert not any(isinstance(each, GPTModel) for each in gc.get_objects()), f"{case}: something keeps the model"
        dist.barrier()
        parallel_state.destroy_model_parallel()
        leave_all_groups()
        return result


def _run(case: Case, folder: Path | None, alone: bool) -> Result:
    config = configured(case)
    models = models_of(case, config, PerDocument if alone else None)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            # A large eps, because Adam otherwise makes as much of an error of a tiny gradient as of the gradient.
            optimizer="adam",
            lr=0.01,
            adam_eps=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=case.shards,
            overlap_param_gather=case.gathers,
        ),
        models,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.timers = Timers(2, "minmax")
    config.no_sync_func = [model.no_sync for model in models]
    if len(models) == 1:
        [config.no_sync_func] = config.no_sync_func
    if case.align:
        config.grad_sync_func = [model.start_grad_sync for model in models]
    if case.align and case.gathers:
        config.param_sync_func = [model.start_param_sync for model in models]
    if case.reads:
        assert folder is not None
        checkpoints.load(folder / case.reads, models, optimizer)
    data_rank = parallel_state.get_data_parallel_rank()
    ranks = range(case.share * data_rank, case.share * (data_rank + 1))
    steps = [-1, *range(case.begin, case.steps)]
    steps_and_numbers = [(step, number) for step in steps for number in range(len(DOCUMENTS))]
    rows, count = ROWS, len(DOCUMENTS) * len(ranks)
    data = [microbatch_of(case, step, number, rank) for step, number in steps_and_numbers for rank in ranks]
    if case.joined and alone:
        rows, count = ROWS * len(ranks), len(DOCUMENTS)
        data = [joined_microbatch_of(case, step, number) for step, number in steps_and_numbers]
    context = None if alone else init(config, max_tokens=ROWS, timeout=30)
    schedule: Any = tick_schedule
    if context is None or case.stock:
        schedule = get_forward_backward_func()
        evaluation, batches = _Local(case, data, context), _Local(case, data[count:], context)
    else:
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), case.pipeline
        reads = parallel_state.get_tensor_model_parallel_rank() == 0 and stage in (0, stages - 1)
        options: dict[str, Any] = {"context": context, "num_microbatches": count, "tolerance": 0.02, "min_rows": 8}
        options["ping_pong"] = case.halved
        if case.joined:
            options["continues"] = lambda batch: batch["continues"]
        evaluation = PlannedBatches(iter(data[:count]) if reads else None, config, forward_only=True, **options)
        batches = PlannedBatches(iter(data[count:]) if reads else None, config, **options)
    common = {
        "forward_step_func": forward_step,
        "num_microbatches": count,
        "seq_length": rows,
        "micro_batch_size": 1,
    }
    losses, norms, largest, imbalance = [], [], [], 1.0
    with torch.no_grad():
        kept = schedule(data_iterator=evaluation, model=models, forward_only=True, **common)
    evaluated = _mean(kept, case)
    for step in steps[1:]:
        if step == BREAK and case.writes:
            assert folder is not None
            checkpoints.save(folder / case.writes, models, optimizer)
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        kept = schedule(data_iterator=batches, model=models, forward_only=False, **common)
        _, norm, _ = optimizer.step()
        losses.append(_mean(kept, case))
        norms.append(float(norm))
        if asks_for_max_logits(config):
            largest.append(_clipped(models, config))
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
    if case.shards or not case.halved:  # Megatron's own may keep the model, and groups with threads; ping-pong may not
        for each in (*models, optimizer):
            each.__dict__.clear()
    return Result(losses, norms, evaluated, largest, taken, imbalance)


def _clipped(models: Sequence[Any], config: Any) -> float:
    """Has Megatron clip the weights, or only find the largest logit, which is that of all layers here."""
    wrapped = [SimpleNamespace(module=model) for model in models]  # as in a Float16Module
    found = torch.tensor(clip_qk(wrapped, log_max_only=not config.qk_clip))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _mean(kept: list[dict[str, Any]], case: Case) -> float:
    """The mean loss over all micro-batches of all data ranks, on all ranks."""
    mine = torch.tensor([[float(each["loss"]), float(each["tokens"])] for each in kept], dtype=torch.float64)
    totals = mine.sum(0) if kept else torch.zeros(2, dtype=torch.float64)
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def train(model: Any, forward_step_func: Any, **given: Any) -> list[Any]:
    """An iteration of `tick_schedule`."""
    return tick_schedule(forward_step_func=forward_step_func, model=model, **given)


def run_all(cases: Sequence[Case], folder: Path | None = None, alone: bool = False) -> list[Result]:
    return [run(case, folder, alone=alone) for case in cases]


def run_all_alone(cases: Sequence[Case], folder: Path | None = None) -> list[Result]:
    """All models in this one process, with PyTorch's attention and Megatron's schedule."""
    alone: dict[str, Result] = {}
    for case in cases:
        if str(case.alone) not in alone:
            alone[str(case.alone)] = run(case.alone, folder, alone=True)
    return [alone[str(case.alone)] for case in cases]


def assert_as_alone(cases: Sequence[Case], of_ranks: list[list[Result]], alone: list[Result]) -> None:
    """Asserts that each case has the losses and the norms of gradients that one process has."""
    for number, case in enumerate(cases):
        results, expected = [of_rank[number] for of_rank in of_ranks], alone[number]
        losses, norms = expected.losses[case.begin :], expected.norms[case.begin :]
        exact = 1e-6 if case.tensor == 1 and not case.begin else 1e-5
        for result in results:
            if not case.begin:
                assert result.evaluated == pytest.approx(expected.evaluated, rel=exact), case
            assert result.losses[0] == pytest.approx(losses[0], rel=exact), case
            assert result.norms[0] == pytest.approx(norms[0], rel=exact), case
            assert result.losses == pytest.approx(losses, rel=1e-5), case
            assert result.norms == pytest.approx(norms, rel=1e-4), case
            assert result.largest == pytest.approx(expected.largest[case.begin :], rel=1e-5), case
            assert result.imbalance < 1.05, case
        assert len({result.steps_of_attention for result in results}) == 1, case
        assert len(expected.losses) == case.steps and expected.losses[-1] != expected.evaluated, case


def figures(cases: Sequence[Case], of_ranks: list[list[Result]], expected: list[Result]) -> list[str]:
    """A line for each case: how far its losses and norms of gradients are at most from those expected."""
    lines = [f"{'losses':>8} {'norms':>8} {'steps':>5}  (largest relative difference)"]
    for number, case in enumerate(cases):
        largest = [
            max(
                abs(found / value - 1)
                for of_rank in of_ranks
                for found, value in zip(
                    getattr(of_rank[number], name), getattr(expected[number], name)[case.begin :], strict=True
                )
            )
            for name in ("losses", "norms")
        ]
        plain = {name: value for name, value in case._asdict().items() if value != Case._field_defaults[name]}
        plain.pop("steps", None)
        lines.append(f"{largest[0]:8.1e} {largest[1]:8.1e} {case.steps - case.begin:5}  {plain}")
    return lines
