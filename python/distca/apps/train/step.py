"""A step of training, with one plan, or with several side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distca.apps.common.memory_log import UNWATCHED, Watch
from distca.apps.common.stopping import StopRequest
from distca.apps.train.checkpoint import Trained
from distca.apps.train.metrics import Compared, StepResult
from distca.apps.train.work import Work
from distca.errors import DistcaError

BALANCED, INSIDE_STAGES, UNBALANCED = "balanced", "balanced inside each stage", "not balanced"
"""The ways of planning that `--compare` runs side by side; the second one in a pipeline only."""

SAME = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far losses and gradient norms with and without balance may differ, relatively.

The bounds are far above rounding and far below any mistake. The rows of attention's output are the same to the bit.
Gradients of keys are added in another order.
"""


def train_step(
    trained: Trained, work: Work, stop: StopRequest | bool, since: float, watch: Watch = UNWATCHED
) -> StepResult:
    """Takes one optimizer step.

    `stop` says whether this rank was asked to stop, and is read when the step is over. `since` says when the step
    before was over, by `time.perf_counter`.
    """
    loss_sum, num_targets = work.forward_backward(trained, watch)
    norm = update(trained, watch)
    loss, interrupted = _share(loss_sum, num_targets, stop)
    return StepResult(loss, interrupted, time.perf_counter() - since, grad_norm=norm)


def compared_step(
    trained: Trained,
    ways: Sequence[tuple[str, Work]],
    stop: StopRequest | bool,
    since: float,
    watch: Watch = UNWATCHED,
) -> StepResult:
    """Takes one optimizer step whose forward and backward run with several plans, in the order of `ways`.

    All begin with the same random state, and therefore drop the same activations. What surrounds them counts for all.
    The way `BALANCED` is the one that the step is reported with, and whose random state the next step has.

    Raises:
        DistcaError: they differ by more than rounding.
    """
    seconds: dict[str, float] = {}
    losses, norms = dict[str, float](), dict[str, float]()
    interrupted = False
    around = time.perf_counter() - since
    random = torch.get_rng_state()
    for name, work in ways:
        torch.set_rng_state(random)
        dist.barrier()
        begin = time.perf_counter()
        loss_sum, num_targets = work.forward_backward(trained, watch)
        losses[name], interrupted = _share(loss_sum, num_targets, stop)
        seconds[name] = time.perf_counter() - begin
        norms[name] = trained.total_norm()
        if name == BALANCED:
            after = torch.get_rng_state()
    torch.set_rng_state(after)
    begin = time.perf_counter()
    norm = update(trained, watch)
    around += time.perf_counter() - begin
    others = {
        name: Compared(
            seconds[name] + around,
            loss_difference=_difference(losses[name], losses[BALANCED]),
            gradient_difference=_difference(norms[name], norms[BALANCED]),
        )
        for name, _ in ways
        if name != BALANCED
    }
    allowed = SAME[trained.dtype]
    for name, beside in others.items():
        if max(beside.loss_difference, beside.gradient_difference) > allowed:
            raise DistcaError(
                f"{BALANCED} and {name}, the losses are {losses[BALANCED]} and {losses[name]}, the gradient norms "
                f"{norms[BALANCED]} and {norms[name]}: they must agree to {allowed:g}"
            )
    return StepResult(
        losses[BALANCED],
        interrupted,
        seconds[BALANCED] + around,
        others.get(UNBALANCED),
        norm,
        inside_stages=others.get(INSIDE_STAGES),
    )


def update(trained: Trained, watch: Watch = UNWATCHED) -> float | None:
    """Applies the gradients. Returns their norm before clipping; None if the run does not clip."""
    norm = trained.clip()
    trained.optimizer.step()
    trained.schedule.step()
    watch.note("optimizer")
    return norm


def mean_loss(loss_sum: torch.Tensor, num_targets: int) -> float:
    """The mean loss over the targets of all ranks, which are `num_targets` together."""
    return _share(loss_sum, num_targets, False)[0]


def _share(loss_sum: torch.Tensor, num_targets: int, stop: StopRequest | bool) -> tuple[float, bool]:
    """The mean loss over the targets of all ranks, and whether any rank was asked to stop."""
    shared = torch.tensor([loss_sum.item(), float(bool(stop))], dtype=torch.float64)
    dist.all_reduce(shared)
    return shared[0].item() / max(num_targets, 1), shared[1].item() > 0


def _difference(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)
