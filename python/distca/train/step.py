"""A training step, alone or with and without balance side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from distca.errors import DistcaError
from distca.planning import Plan, Plans
from distca.train.checkpoint import Trained
from distca.train.data import Batch
from distca.train.memory_log import Note, ignore
from distca.train.metrics import StepResult, Unbalanced

SAME = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far losses and gradient norms with and without balance may differ, relative: far above rounding, far below any
mistake. The rows of attention's output are the same to the bit; gradients of keys are added in another order."""


Work = Sequence[tuple[Batch, Plan | Plans]]
"""What a step computes: a batch with its plans; with ping-pong its two halves, each with its own."""


def train_step(trained: Trained, work: Work, stop: bool, since: float, note: Note = ignore) -> StepResult:
    """One optimizer step. `stop`: whether this rank was asked to; `since`: when the step before was over."""
    loss_sum = forward_backward(trained, work, note)
    norm = update(trained, note)
    loss, interrupted = _share(loss_sum, work, stop)
    return StepResult(loss, interrupted, time.perf_counter() - since, grad_norm=norm)


def compared_step(
    trained: Trained,
    work: Work,
    unbalanced: Work,
    stop: bool,
    since: float,
    balanced_first: bool,
    note: Note = ignore,
) -> StepResult:
    """One optimizer step whose forward and backward run with both plans. What surrounds them counts for both.

    Raises DistcaError where the two differ by more than rounding.
    """
    seconds, losses, norms = {}, {}, {}
    interrupted = False
    around = time.perf_counter() - since
    for balanced in (balanced_first, not balanced_first):
        dist.barrier()
        begin = time.perf_counter()
        loss_sum = forward_backward(trained, work if balanced else unbalanced, note)
        losses[balanced], interrupted = _share(loss_sum, work, stop)
        seconds[balanced] = time.perf_counter() - begin
        norms[balanced] = gradient_norm(trained.model)
    begin = time.perf_counter()
    norm = update(trained, note)
    around += time.perf_counter() - begin
    beside = Unbalanced(
        seconds[False] + around,
        loss_difference=_difference(losses[False], losses[True]),
        gradient_difference=_difference(norms[False], norms[True]),
    )
    allowed = SAME[next(trained.model.parameters()).dtype]
    if max(beside.loss_difference, beside.gradient_difference) > allowed:
        raise DistcaError(
            f"with and without balance the losses are {losses[True]} and {losses[False]}, the gradient norms "
            f"{norms[True]} and {norms[False]}: they must agree to {allowed:g}"
        )
    return StepResult(losses[True], interrupted, seconds[True] + around, beside, norm)


def forward_backward(trained: Trained, work: Work, note: Note = ignore) -> torch.Tensor:
    """Leaves the gradients of the mean loss in the model and returns the sum of this rank's losses."""
    trained.optimizer.zero_grad()
    loss_sum = sum_of_losses(trained.model, work)
    note("forward")
    # Gradients are averaged over ranks; the loss is the mean over targets, of which ranks hold different numbers.
    (loss_sum * (dist.get_world_size() / max(_num_targets(work), 1))).backward()
    note("backward")
    return loss_sum


def sum_of_losses(model: torch.nn.Module, work: Work) -> torch.Tensor:
    """Cross entropy summed over the targets of this rank, fp32; zero (with gradients of zero) where it has none."""
    inputs = [
        {
            "input_ids": batch.input_ids,
            "position_ids": plan.layout.position_ids(plan.rank).unsqueeze(0),
            "use_cache": False,
            "plan": plan,
        }
        for batch, plan in work
    ]
    outputs = [model(**inputs[0])] if len(inputs) == 1 else model(*inputs)
    losses = [
        F.cross_entropy(output.logits[0].float(), batch.labels[0], reduction="sum")
        for output, (batch, _) in zip(outputs, work, strict=True)
    ]
    return torch.stack(losses).sum()


def _num_targets(work: Work) -> int:
    """Of all ranks."""
    return sum(batch.num_targets for batch, _ in work)


def update(trained: Trained, note: Note = ignore) -> float | None:
    """Applies the gradients. Returns their norm before it is clipped, where it is."""
    norm = None
    if trained.clip_norm is not None:
        norm = _number(clip_grad_norm_(trained.model.parameters(), trained.clip_norm))
    trained.optimizer.step()
    trained.schedule.step()
    note("optimizer")
    return norm


def gradient_norm(model: torch.nn.Module) -> float:
    """Of all gradients together, the same on every rank."""
    return _number(get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))


def _number(norm: torch.Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _share(loss_sum: torch.Tensor, work: Work, stop: bool) -> tuple[float, bool]:
    """The mean loss over all ranks' targets, and whether any rank was asked to stop."""
    shared = torch.tensor([loss_sum.item(), float(stop)], dtype=torch.float64)
    dist.all_reduce(shared)
    return shared[0].item() / max(_num_targets(work), 1), shared[1].item() > 0


def _difference(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)
