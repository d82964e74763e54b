"""Ranks whose halves do not go together are told the tick, the half and what to change; none waits for a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from distca.pipeline import CurrentTick, PipelinePlans, Ticks
from support.mistakes import Forward, Mistakes, Told, iterate

HEADS = distca.Heads(q=2, kv=1, dim=8)
LAYERS = 2
mistake = Mistakes()


def _plans(context: distca.Context, *, layers: Any = LAYERS, last: int = 5) -> PipelinePlans:
    layouts = [distca.Layout.from_documents([[30, 10 + 8 * i], [20, 10, last]]) for i in range(3)]
    halves = [distca.halves(layout) for layout in layouts]
    stages = [[0, 1], [2, 3]]
    return PipelinePlans(layouts, HEADS, stages=stages, layers=layers, halves=halves, context=context, min_rows=8)


class Layers(torch.nn.Module):
    """Layers of attention alone, each of which is run again if `recompute` says so."""

    def __init__(self, number: int = LAYERS, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.number, self.recompute, self.options = number, recompute, {"use_reentrant": False} | options

    def forward(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
        for _ in range(self.number):
            x = checkpoint(self.layer, x, plan, **self.options) if self.recompute else self.layer(x, plan)
        return x

    @staticmethod
    def layer(x: torch.Tensor, plan: Any) -> torch.Tensor:
        return x + distca.core_attention(x, x[:, :1], x[:, :1], plan)[0]


def _x(plans: PipelinePlans, tick: CurrentTick) -> torch.Tensor:
    assert tick.work is not None
    return torch.ones(plans.rows(tick.work.microbatch), 2, 8, requires_grad=True)


def _halves(ticks: Ticks, tick: CurrentTick, model: torch.nn.Module | None = None, plan: Any = None) -> list[Any]:
    """The outputs of both halves."""
    assert tick.work is not None
    plan = ticks.plan if plan is None else plan
    parts = ticks.plans.split(tick.work.microbatch, _x(ticks.plans, tick))
    return list(distca.PingPong(model or Layers())(*({"x": x, "plan": plan} for x in parts)))


def _forward(ticks: Ticks, tick: CurrentTick, model: torch.nn.Module | None = None, plan: Any = None) -> torch.Tensor:
    first, second = _halves(ticks, tick, model, plan)
    return first.sum() + second.sum()


def _iterate(ticks: Ticks, forward: Forward = _forward, **how: Any) -> None:
    iterate(ticks, forward, **how)


@mistake("")
def none_at_all(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context), context=context))


@mistake("")
def none_at_all_with_recomputation(context: distca.Context, wrong: bool) -> None:
    ticks = Ticks(_plans(context), context=context, recompute="layer")
    _iterate(ticks, lambda ticks, tick: _forward(ticks, tick, Layers(recompute=True)))


@mistake("tick 0 of 8, forward: stage 1 ended the tick after 0 of 4 steps .*2 layers of two halves.* tick.serve")
def an_idle_stage_serves_nothing(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context), context=context), serve=lambda tick: None if wrong else tick.serve())


@mistake(
    r"rank \d (came to this step|found that rank \d)|tick 0 of 8, forward: stage 1 ended the tick after 2 of 4 steps"
)
def an_idle_stage_serves_one_layer_too_few(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)

    def serve(tick: CurrentTick) -> None:
        layers = [(plans.plan(tick.number, step, 0), plans.plan(tick.number, step, 1)) for step in range(LAYERS)]
        distca.serve_ping_pong(layers[: LAYERS - wrong], tick.phase)

    _iterate(Ticks(plans, context=context), serve=serve)


@mistake(r'rank \d (came to this step|found that rank \d).*"tick 0 of 8, forward, (first|second) half"')
def an_idle_stage_serves_one_half_after_the_other(context: distca.Context, wrong: bool) -> None:
    def serve(tick: CurrentTick) -> None:
        if wrong:
            tick.calls.sort(key=lambda call: call.half or 0)
        tick.serve()

    _iterate(Ticks(_plans(context), context=context), serve=serve)


@mistake(
    "tick 1 of 8, forward: the plans have halves, and the model is called outside of distca.PingPong. .*plans.split"
)
def a_model_is_called_without_ping_pong(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        return Layers()(_x(ticks.plans, tick), ticks.plan).sum() if wrong else _forward(ticks, tick)

    _iterate(Ticks(_plans(context), context=context), forward)


@mistake(
    "tick 1 of 8, forward: the plans have halves, and a half of distca.PingPong has a plan .* ticks.plan is an argument"
)
def the_plan_is_no_argument_of_the_halves(context: distca.Context, wrong: bool) -> None:
    class Model(Layers):
        def forward(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
            return super().forward(x, plan[0]() if wrong else plan)

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        return _forward(ticks, tick, Model(), [lambda: ticks.plan] if wrong else None)

    _iterate(Ticks(_plans(context), context=context), forward)


def _shallow(context: distca.Context, pad: Callable[[Ticks, torch.Tensor, Any, list[int]], torch.Tensor]) -> None:
    """Stage 1 has one layer of two."""
    ticks = Ticks(_plans(context, layers=[2, 1]), context=context)

    class Model(Layers):
        def forward(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
            x = super().forward(x, plan)
            ended.append(len(ended))
            return x if ticks.plans.stage == 0 else pad(ticks, x, plan, ended)

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        ended.clear()
        return _forward(ticks, tick, Model(2 - ticks.plans.stage))

    ended: list[int] = []
    _iterate(ticks, forward)


@mistake("tick 1 of 8, forward: the first half of stage 1 ended after 1 of 2 steps. .* plan.pad")
def a_shallow_stage_does_not_pad(context: distca.Context, wrong: bool) -> None:
    _shallow(context, lambda ticks, x, plan, ended: x if wrong else plan.pad(x))


@mistake("tick 1 of 8, forward: the second half of stage 1 ended after 1 of 2 steps. .* plan.pad")
def a_shallow_stage_pads_in_one_half(context: distca.Context, wrong: bool) -> None:
    _shallow(context, lambda ticks, x, plan, ended: x if wrong and len(ended) == 2 else plan.pad(x))


@mistake("tick 1 of 8, forward: the plans have halves, and a half of .* layers and pad")
def a_half_pads_with_the_plan_of_the_whole(context: distca.Context, wrong: bool) -> None:
    _shallow(context, lambda ticks, x, plan, ended: ticks.pad(x) if wrong else plan.pad(x))


@mistake(
    "tick 1 of 8, forward: the first half of stage 1 calls core_attention more often .*: 2. What to change: layers"
)
def a_stage_has_a_layer_more(context: distca.Context, wrong: bool) -> None:
    model = Layers(LAYERS + wrong)
    _iterate(Ticks(_plans(context), context=context), lambda ticks, tick: _forward(ticks, tick, model))


@mistake("tick 1 of 8, forward: the first half of stage 1 ended after 1 of 2 steps. .* one distca.PingPong runs all")
def every_layer_has_a_ping_pong_of_its_own(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        if not wrong:
            return _forward(ticks, tick)
        return _forward(ticks, tick, Layers(1)) + _forward(ticks, tick, Layers(1))

    _iterate(Ticks(_plans(context), context=context), forward)


@mistake("tick 2 of 8, backward: the second half of stage 1 calls core_attention more often .* recompute= of Ticks")
def recomputation_is_known_to_some_ranks_only(context: distca.Context, wrong: bool) -> None:
    ticks = Ticks(_plans(context), context=context, recompute=None if wrong else "layer")
    _iterate(ticks, lambda ticks, tick: _forward(ticks, tick, Layers(recompute=True)))


@mistake(r'rank \d (came to this step|found that rank \d).*"tick 2 of 8, backward, (first|second) half"')
def checkpointing_is_reentrant(context: distca.Context, wrong: bool) -> None:
    ticks = Ticks(_plans(context), context=context, recompute="layer")
    model = Layers(recompute=True, use_reentrant=wrong)
    _iterate(ticks, lambda ticks, tick: _forward(ticks, tick, model))


@mistake(r'rank \d (came to this step|found that rank \d).*"tick 2 of 8, backward, (first|second) half"')
def the_halves_go_backward_one_after_the_other(context: distca.Context, wrong: bool) -> None:
    def backward(outputs: list[torch.Tensor]) -> None:
        for loss in [output.sum() for output in outputs] if wrong else [outputs[0].sum() + outputs[1].sum()]:
            loss.backward()

    _iterate(Ticks(_plans(context), context=context), _halves, backward=backward)  # type: ignore[arg-type]


@mistake(r'rank \d (came to this step|found that rank \d).*"tick 2 of 8, backward, (first|second) half"')
def one_half_goes_backward(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        first, second = _halves(ticks, tick)
        return first.sum() if wrong else first.sum() + second.sum()

    _iterate(Ticks(_plans(context), context=context), forward)


@mistake("plan is of another layout: it has 15 rows on rank 3, the tensors have 20")
def the_halves_are_swapped(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        assert tick.work is not None
        parts = list(ticks.plans.split(tick.work.microbatch, _x(ticks.plans, tick)))
        assert not wrong or len(parts[0]) != len(parts[1])
        return sum(
            out.sum()
            for out in distca.PingPong(Layers())(
                *({"x": x, "plan": ticks.plan} for x in (parts[::-1] if wrong else parts))
            )
        )

    _iterate(Ticks(_plans(context), context=context), forward)


@mistake("tick 0 of 8, forward, (first|second) half.*3 documents of 46 tokens on rank 3")
def a_micro_batch_differs_on_a_rank(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context, last=6 if wrong else 5), context=context))


@pytest.fixture(scope="module")
def told() -> dict[str, list[Told]]:
    """For each mistake of rank 3 what each rank is told."""
    return mistake.told(HEADS, ranks=4, wrong_rank=3)


@pytest.mark.parametrize("name", [name for name in mistake if name.startswith("none")])
def test_no_mistake_no_error(told: dict[str, list[Told]], name: str) -> None:
    assert [kind for kind, _, _ in told[name]] == [""] * 4


@pytest.mark.parametrize("name", [name for name in mistake if not name.startswith("none")])
def test_all_ranks_are_told_at_once(told: dict[str, list[Told]], name: str) -> None:
    mistake.assert_told_at_once(name, told[name])
