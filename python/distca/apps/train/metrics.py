"""The figures of a run: those of each step, and their summary."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distca.apps.common.files import as_json
from distca.pipeline import PipelinePlans
from distca.planner.layout import Layout, Window
from distca.planner.plan import Plans

_COMPARED = ("unbalanced", "inside_stages")
_ENDS = 5  # number of steps at either end over which the loss is averaged, in a run of at least twice as many


@dataclass(frozen=True)
class AttentionLoads:
    """The attention of one step, all layers added up: each rank's load in units of the cost model, and the traffic."""

    before: list[int]  # every row computed at home
    after: list[int]  # as planned
    imbalance_before: float  # largest load over the mean; micro-batches add up their largest loads
    imbalance_after: float
    bytes: int  # moved between ranks, forward and backward
    plan_ms: float  # planning the step on one rank
    larger_half: float | None = None  # with ping-pong, the share of the load that the larger halves have

    @staticmethod
    def of(micro_batches: Sequence[Sequence[Plans]], windows: Sequence[Window]) -> AttentionLoads:
        """Adds up the plans of a step.

        `micro_batches` are the plans of each micro-batch; with ping-pong those of its two halves. `windows` has the
        window of each layer.
        """
        stats = [[plans.for_window(window).stats for plans in parts for window in windows] for parts in micro_batches]
        before = [_added([layer.load_before for layer in layers]) for layers in stats]
        after = [_added([layer.load for layer in layers]) for layers in stats]
        halves = [
            [sum(sum(plans.for_window(window).stats.load_before) for window in windows) for plans in parts]
            for parts in micro_batches
        ]
        return AttentionLoads(
            before=_added(before),
            after=_added(after),
            imbalance_before=_imbalance(before),
            imbalance_after=_imbalance(after),
            bytes=sum(sum(layer.bytes.values()) for layers in stats for layer in layers),
            plan_ms=sum(plan.stats.plan_ms for parts in micro_batches for plans in parts for plan in plans.values()),
            larger_half=sum(map(max, halves)) / sum(map(sum, halves)) if len(halves[0]) == 2 else None,
        )

    @staticmethod
    def of_ticks(plans: PipelinePlans) -> AttentionLoads:
        """Adds up the plans of an iteration of a pipeline. A load is that of forward and of backward ticks.

        An imbalance is the sum over ticks of the largest load, over the sum of the means.
        """
        stats = plans.stats
        steps = [step for tick in stats.ticks for step in tick.steps]
        halves = None
        if plans.halves is not None:
            of_parts = [[sum(step.load_before) for step in steps[part :: len(plans.parts)]] for part in (0, 1)]
            halves = sum(map(max, *of_parts)) / (sum(map(sum, of_parts)) or 1)
        return AttentionLoads(
            before=_added([step.load_before for step in steps]),
            after=_added([step.load for step in steps]),
            imbalance_before=stats.imbalance_before,
            imbalance_after=stats.imbalance_after,
            bytes=stats.bytes,
            plan_ms=sum(step.plan_ms for step in {id(step): step for step in steps}.values()),
            larger_half=halves,
        )


@dataclass(frozen=True)
class Compared:
    """A step with other plans, compared with the balanced step."""

    seconds: float
    loss_difference: float  # relative
    gradient_difference: float  # of the gradient's norm, relative


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step."""

    loss: float  # mean over all targets of all ranks
    interrupted: bool  # whether any rank was asked to stop
    seconds: float  # on this rank, since the end of the step before
    unbalanced: Compared | None = None
    grad_norm: float | None = None  # of all gradients before clipping, if the run clips
    inside_stages: Compared | None = None


@dataclass(frozen=True)
class StepMetrics:
    """One step of all ranks."""

    step: int
    loss: float  # mean over all targets of all ranks
    tokens: int  # of all ranks
    seconds: float  # on rank 0, the wait for the plan included
    imbalance_before: float  # largest attention load over the mean, every row computed at home
    imbalance_after: float  # the same, as planned
    bytes: int  # moved between ranks, forward and backward, all layers
    plan_ms: float  # planning one step on one rank
    unbalanced: Compared | None = None  # every row computed at home, if the run compares
    inside_stages: Compared | None = None  # balanced inside each stage, if a pipeline compares
    larger_half: float | None = None  # with ping-pong, the share of the attention that its larger half has
    grad_norm: float | None = None  # of all gradients before clipping, if the run clips
    eval_loss: float | None = None  # after this step, on documents held out, if it was evaluated

    @staticmethod
    def of(step: int, result: StepResult, layouts: Sequence[Layout], loads: AttentionLoads) -> StepMetrics:
        return StepMetrics(
            step=step,
            loss=result.loss,
            tokens=sum(sum(layout.document_lengths) for layout in layouts),
            seconds=result.seconds,
            imbalance_before=loads.imbalance_before,
            imbalance_after=loads.imbalance_after,
            bytes=loads.bytes,
            plan_ms=loads.plan_ms,
            unbalanced=result.unbalanced,
            inside_stages=result.inside_stages,
            larger_half=loads.larger_half,
            grad_norm=result.grad_norm,
        )

    @staticmethod
    def from_json(line: str) -> StepMetrics:
        """The inverse of `to_json`. Raises ValueError or TypeError for what `to_json` does not write."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise TypeError("no object")
        beside = {name: values.pop(name) for name in _COMPARED if name in values}
        compared = {name: Compared(**_figures(other)) for name, other in beside.items()}
        return StepMetrics(**(_figures(values) | compared))

    def to_json(self) -> str:
        """A line of JSON. A figure that is not finite is null."""
        return as_json({name: value for name, value in asdict(self).items() if value is not None})

    def scalars(self) -> dict[str, float]:
        """Figures by name, for TensorBoard."""
        scalars = {
            "loss": self.loss,
            "tokens per second": self.tokens / self.seconds,
            "imbalance/before": self.imbalance_before,
            "imbalance/after": self.imbalance_after,
            "bytes moved": self.bytes,
            "plan ms": self.plan_ms,
            "seconds/balanced" if self.unbalanced else "seconds/step": self.seconds,
        }
        if self.unbalanced is not None:
            scalars["seconds/unbalanced"] = self.unbalanced.seconds
        if self.inside_stages is not None:
            scalars["seconds/balanced inside stages"] = self.inside_stages.seconds
        if self.grad_norm is not None:
            scalars["gradient norm"] = self.grad_norm
        if self.eval_loss is not None:
            scalars["evaluation loss"] = self.eval_loss
        return scalars


def _figures(values: Any) -> dict[str, Any]:
    """The figures of a line of metrics, NaN for null. Raises TypeError for anything but finite numbers and null."""
    if not isinstance(values, dict):
        raise TypeError("no object")
    for name, value in values.items():
        if value is not None and not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
            raise TypeError(f"{name} is not a finite number")
    return {name: math.nan if value is None else value for name, value in values.items()}


def _ends(num_steps: int) -> int:
    """Over how many steps at either end of a run the loss is averaged. The two ends share no step."""
    return max(1, min(_ENDS, num_steps // 2))


def summarise(steps: list[StepMetrics]) -> dict[str, Any]:
    """The summary of a run: means over all its steps, those before a resume included.

    The loss at the start and at the end is the mean of up to five steps there, at most half of the run each.
    """
    num_steps = len(steps)
    # The first step has one-time costs. If there are other steps, the rate is theirs.
    timed = steps[1:] or steps
    ends = _ends(num_steps)
    loss_first = sum(step.loss for step in steps[:ends]) / ends
    loss_last = sum(step.loss for step in steps[-ends:]) / ends
    summary: dict[str, Any] = {
        "steps": num_steps,
        "loss_first": loss_first,
        "loss_last": loss_last,
        "loss_ratio": loss_last / loss_first if loss_first else math.nan,  # no target of the first steps: no loss
        "seconds": sum(step.seconds for step in steps),
        "tokens_per_second": sum(step.tokens for step in timed) / sum(step.seconds for step in timed),
        "imbalance_before": sum(step.imbalance_before for step in steps) / num_steps,
        "imbalance_after": sum(step.imbalance_after for step in steps) / num_steps,
        "bytes_per_step": sum(step.bytes for step in steps) / num_steps,
        "plan_ms": sum(step.plan_ms for step in steps) / num_steps,
    }
    halved = [step.larger_half for step in steps if step.larger_half is not None]
    if halved:
        summary["larger_half"] = sum(halved) / len(halved)
    evaluated = [step for step in steps if step.eval_loss is not None]
    if evaluated:
        summary["eval_loss"], summary["eval_step"] = evaluated[-1].eval_loss, evaluated[-1].step + 1
    for key, name in (("compare", "unbalanced"), ("compare_inside_stages", "inside_stages")):
        compared = [(step.seconds, other) for step in timed if (other := getattr(step, name)) is not None]
        if compared:
            summary[key] = {
                "steps": len(compared),
                "seconds_balanced": statistics.median(seconds for seconds, _ in compared),
                f"seconds_{name}": statistics.median(other.seconds for _, other in compared),
                "ratio": statistics.median(seconds / other.seconds for seconds, other in compared),
                "loss_difference": max(other.loss_difference for _, other in compared),
                "gradient_difference": max(other.gradient_difference for _, other in compared),
            }
    return summary


def _added(loads: Sequence[Sequence[int]]) -> list[int]:
    """Loads of each rank, added up."""
    return [sum(of_rank) for of_rank in zip(*loads, strict=True)]


def _imbalance(loads: Sequence[Sequence[int]]) -> float:
    """Largest load over the mean, of the loads of ranks in micro-batches that run one after the other."""
    total = sum(map(sum, loads))
    return sum(map(max, loads)) * len(loads[0]) / total if total else 1.0


_WHY_SKIPPED = {
    "files": "files skipped because they are not UTF-8 text",
    "lines": "lines skipped because they are not JSON objects with a text",
    "rows": "rows skipped because they have neither text nor tokens",
}


def _skipped(summary: dict[str, Any]) -> str:
    unit = next(unit for unit in _WHY_SKIPPED if f"{unit}_skipped" in summary)
    return f"{_WHY_SKIPPED[unit]}: {summary[f'{unit}_skipped']}"


def describe(summary: dict[str, Any]) -> str:
    """The summary as text."""
    how = "stopped" if summary["interrupted"] else "finished"
    rate = f"{summary['tokens_per_second']:,.0f} tokens/s"
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    ends = _ends(summary["steps"])
    averaged = "first and last step" if ends == 1 else f"means of the first and last {ends} steps"
    lines = [
        f"{how} after {summary['steps']} steps, {summary['seconds']:.1f} s, {rate}",
        f"loss       {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}, ratio {summary['loss_ratio']:.2f} "
        f"({averaged})",
        f"imbalance  {before:.2f} -> {after:.2f} (largest attention load over the mean)",
        f"moved      {summary['bytes_per_step'] / 1e6:.1f} MB a step, planned in {summary['plan_ms']:.2f} ms",
        f"documents  {summary['documents']}, {_skipped(summary)}",
    ]
    if (evaluated := summary.get("eval_loss")) is not None:
        lines.insert(2, f"evaluated  {evaluated:.3f} after step {summary['eval_step']}")
    if (larger := summary.get("larger_half")) is not None:
        lines.append(f"ping-pong  the larger half of a step has {larger:.2f} of its attention")
    if (compare := summary.get("compare")) is not None:
        lines += [
            f"step time  {compare['seconds_balanced']:.3f} s balanced, {compare['seconds_unbalanced']:.3f} s not "
            f"(medians of {compare['steps']} pairs), ratio {compare['ratio']:.3f} (median of the pairs' ratios)",
            f"           the same loss to {compare['loss_difference']:.1e}, the same gradient norm to "
            f"{compare['gradient_difference']:.1e} (largest relative differences)",
        ]
    if (compare := summary.get("compare_inside_stages")) is not None:
        lines.append(
            f"           {compare['seconds_inside_stages']:.3f} s balanced inside each stage, ratio "
            f"{compare['ratio']:.3f}, the same loss to {compare['loss_difference']:.1e}"
        )
    if (traced := summary.get("trace")) is not None:
        lines.append(
            f"idle       {min(traced['idle']):.2%} of a step on the slowest rank, {max(traced['idle']):.2%} on the one "
            f"that idles most (steps {traced['steps'][0]} to {traced['steps'][-1]})"
        )
    lines.append(f"written to {summary['run']}")
    lines += [f"note       {note}" for note in summary["notes"]]
    if summary["interrupted"]:
        lines.append(f"go on with: distca train --resume {summary['run']}")
    return "\n".join(lines)
