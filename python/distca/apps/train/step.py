"""A step of training, with one plan, or with and without balance side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from distca.apps.train.checkpoint import Trained
from distca.apps.train.memory_log import UNWATCHED, Watch
from distca.apps.train.metrics import StepResult, Unbalanced
from distca.apps.train.micro_batches import MicroBatch
from distca.errors import DistcaError

SAME = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far losses and gradient norms with and without balance may differ, relatively.

The bounds are far above rounding and far below any mistake. The rows of attention's output are the same to the bit.
Gradients of keys are added in another order.
"""


def train_step(
    trained: Trained, work: Iterable[MicroBatch], stop: bool, since: float, watch: Watch = UNWATCHED
) -> StepResult:
    """Takes one optimizer step.

    `stop` says whether this rank was asked to stop. `since` says when the step before was over, by `time.perf_counter`.
    """
    loss_sum, num_targets = forward_backward(trained, work, watch)
    norm = update(trained, watch)
    loss, interrupted = _share(loss_sum, num_targets, stop)
    return StepResult(loss, interrupted, time.perf_counter() - since, grad_norm=norm)


def compared_step(
    trained: Trained,
    work: Sequence[MicroBatch],
    unbalanced: Sequence[MicroBatch],
    stop: bool,
    since: float,
    balanced_first: bool,
    watch: Watch = UNWATCHED,
) -> StepResult:
    """Takes one optimizer step whose forward and backward run with both plans. What surrounds them counts for both.

    Raises:
        DistcaError: the two differ by more than rounding.
    """
    seconds, losses, norms = {}, {}, {}
    interrupted = False
    around = time.perf_counter() - since
    for balanced in (balanced_first, not balanced_first):
        dist.barrier()
        begin = time.perf_counter()
        loss_sum, num_targets = forward_backward(trained, work if balanced else unbalanced, watch)
        losses[balanced], interrupted = _share(loss_sum, num_targets, stop)
        seconds[balanced] = time.perf_counter() - begin
        norms[balanced] = gradient_norm(trained.model)
    begin = time.perf_counter()
    norm = update(trained, watch)
    around += time.perf_counter() - begin
    beside = Unbalanced(
        seconds[False] + around,
        loss_difference=_difference(losses[False], losses[True]),
        gradient_difference=_difference(norms[False], norms[True]),
    )
    allowed = SAME[next(iter(work[0].plans[0].values())).heads.dtype]
    if max(beside.loss_difference, beside.gradient_difference) > allowed:
        raise DistcaError(
            f"with and without balance the losses are {losses[True]} and {losses[False]}, the gradient norms "
            f"{norms[True]} and {norms[False]}: they must agree to {allowed:g}"
        )
    return StepResult(losses[True], interrupted, seconds[True] + around, beside, norm)


def forward_backward(
    trained: Trained, work: Iterable[MicroBatch], watch: Watch = UNWATCHED
) -> tuple[torch.Tensor, int]:
    """Leaves the gradients of the step's mean loss in the model.

    Returns:
        The sum of this rank's losses, and the number of targets of all ranks.
    """
    trained.optimizer.zero_grad()
    sums, num_targets = [], 0
    for micro_batch in work:
        watch.begin(micro_batch.plans)
        with _gradients_added_up(trained, over_ranks=micro_batch.last):
            loss_sum = sum_of_losses(trained.model, micro_batch)
            watch.note("forward")
            num_targets = micro_batch.num_targets
            # The ranks' gradients are averaged, but the loss is the mean over targets, and ranks have different numbers
            # of targets.
            (loss_sum * (dist.get_world_size() / max(num_targets, 1))).backward()
        watch.note("backward")
        sums.append(loss_sum.detach())
    return torch.stack(sums).sum(), num_targets


@contextmanager
def _gradients_added_up(trained: Trained, *, over_ranks: bool) -> Iterator[None]:
    """Makes backward add gradients to those of the micro-batches before. After the last one the ranks add up theirs."""
    model = trained.model
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if over_ranks else model.no_sync():
            yield
        return
    sharded: Any = trained.saved or model
    if hasattr(sharded, "set_requires_gradient_sync"):  # FSDP2, whose import takes half a second
        sharded.set_requires_gradient_sync(over_ranks)
    yield


def sum_of_losses(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Cross entropy summed over this rank's targets, fp32. Without targets it is zero, with gradients of zero."""
    inputs = [
        {
            "input_ids": batch.input_ids,
            "position_ids": plan.layout.position_ids(plan.rank).unsqueeze(0),
            "use_cache": False,
            "plan": plan,
        }
        for batch, plan in micro_batch.parts
    ]
    outputs = [model(**inputs[0])] if len(inputs) == 1 else model(*inputs)
    losses = [
        F.cross_entropy(output.logits[0].float(), batch.labels[0], reduction="sum")
        for output, (batch, _) in zip(outputs, micro_batch.parts, strict=True)
    ]
    return torch.stack(losses).sum()


def update(trained: Trained, watch: Watch = UNWATCHED) -> float | None:
    """Applies the gradients. Returns their norm before clipping; None if the run does not clip."""
    norm = None
    if trained.clip_norm is not None:
        norm = _number(clip_grad_norm_(trained.model.parameters(), trained.clip_norm))
    trained.optimizer.step()
    trained.schedule.step()
    watch.note("optimizer")
    return norm


def gradient_norm(model: torch.nn.Module) -> float:
    """The norm of all gradients together, the same on every rank."""
    return _number(get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))


def _number(norm: torch.Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def mean_loss(loss_sum: torch.Tensor, num_targets: int) -> float:
    """The mean loss over the targets of all ranks, which are `num_targets` together."""
    return _share(loss_sum, num_targets, False)[0]


def _share(loss_sum: torch.Tensor, num_targets: int, stop: bool) -> tuple[float, bool]:
    """The mean loss over the targets of all ranks, and whether any rank was asked to stop."""
    shared = torch.tensor([loss_sum.item(), float(stop)], dtype=torch.float64)
    dist.all_reduce(shared)
    return shared[0].item() / max(num_targets, 1), shared[1].item() > 0


def _difference(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)
