"""Ranks whose ticks do not go together are told the tick, the step and what to change, and none waits for a timeout."""

from __future__ import annotations

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


def _plans(context: distca.Context, *, microbatches: int = 3, layers: Any = LAYERS) -> PipelinePlans:
    layouts = [distca.Layout.from_documents([[40 + 8 * i], [30, 10 + 8 * i]]) for i in range(microbatches)]
    stages = [[0, 1], [2, 3]]
    return PipelinePlans(layouts, HEADS, stages=stages, layers=layers, context=context, min_rows=8)


def _attend(plan: Any, rows: int, **options: Any) -> torch.Tensor:
    q, k, v = (torch.ones(rows, n, 8, requires_grad=True) for n in (2, 1, 1))
    return distca.core_attention(q, k, v, plan, **options)[0]


def _forward(ticks: Ticks, tick: CurrentTick, layers: int = LAYERS) -> torch.Tensor:
    """A stage whose layers do not depend on each other: only the number of calls and their order count here."""
    assert tick.work is not None
    return torch.stack([_attend(ticks.plan, ticks.plans.rows(tick.work.microbatch)).sum() for _ in range(layers)]).sum()


def _iterate(ticks: Ticks, forward: Forward = _forward, **how: Any) -> None:
    iterate(ticks, forward, **how)


@mistake("")
def none_at_all(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context), context=context))


@mistake("tick 0 of 8, forward: stage 1 ended the tick after 0 of 2 steps of attention")
def an_idle_stage_serves_nothing(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context), context=context), serve=lambda tick: None if wrong else tick.serve())


@mistake("tick 0 of 8, forward: stage 1 ended the tick after 1 of 2 steps of attention")
def an_idle_stage_serves_one_step_too_few(context: distca.Context, wrong: bool) -> None:
    def serve(tick: CurrentTick) -> None:
        calls = tick.calls
        tick.calls = calls[:-1] if wrong else calls
        tick.serve()
        tick.calls = calls

    _iterate(Ticks(_plans(context), context=context), serve=serve)


@mistake(r"rank \d (came to this step with another|found that rank \d)")
def the_other_phase_is_served(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)

    def serve(tick: CurrentTick) -> None:
        if not wrong:
            return tick.serve()
        other = "backward" if tick.phase == "forward" else "forward"
        for call in tick.calls:
            distca.serve(plans.plan(tick.number, call.layer), other)
        return None

    _iterate(Ticks(plans, context=context), serve=serve)


@mistake("tick 2 of 8, backward: stage 1 calls core_attention more often .* recompute= of Ticks")
def recomputation_is_known_to_some_ranks_only(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        rows = ticks.plans.rows(tick.work.microbatch) if tick.work else 0
        x = torch.ones(rows, 2, 8, requires_grad=True)
        for _ in range(LAYERS):
            x = checkpoint(
                lambda q: distca.core_attention(q, q[:, :1], q[:, :1], ticks.plan)[0], x, use_reentrant=False
            )
        return x.sum()

    ticks = Ticks(_plans(context), context=context, recompute=None if wrong else "layer")
    _iterate(ticks, forward=forward)


@mistake("rank 3 has 40 rows in this plan")
def a_rank_is_a_tick_ahead(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)
    if wrong:
        plans._plans = [*plans._plans[1:], plans._plans[0]]
    _iterate(Ticks(plans, context=context))


@mistake("plan is of another layout: it has .* rows on rank 3")
def a_layer_keeps_the_plan_of_its_first_tick(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        assert tick.work is not None
        plan = plans.plan(0 if wrong else tick.number, 0)
        backward = plans.plan(plans.table.tick_of("backward", plans.stage, tick.work), 0)
        rows = plan.num_rows
        return torch.stack([_attend(plan, rows, plan_backward=backward).sum() for _ in range(LAYERS)]).sum()

    _iterate(Ticks(plans, context=context), forward=forward)


# Either side may find it first, and then names the other one first.
@mistake(r'(?=.*"tick 2 of 8, backward" on rank [012])(?=.*"tick 1 of 8, forward" on rank 3)')
def backward_gets_the_plan_of_forward(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        if not wrong:
            return _forward(ticks, tick)
        plan = plans.plan(tick.number, 0)
        return torch.stack([_attend(plan, plan.num_rows).sum() for _ in range(LAYERS)]).sum()

    _iterate(Ticks(plans, context=context), forward=forward)


@mistake("tick 1 of 8, forward: stage 1 calls core_attention more often .*: 2. What to change: layers=")
def a_stage_has_a_layer_more(context: distca.Context, wrong: bool) -> None:
    layers = LAYERS + 1 if wrong else LAYERS
    _iterate(Ticks(_plans(context), context=context), forward=lambda ticks, tick: _forward(ticks, tick, layers))


@mistake("tick 1 of 8, forward: stage 1 ended the tick after 1 of 2 steps .* ticks.pad")
def a_shallow_stage_does_not_pad(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context, layers=[2, 1])

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        assert tick.work is not None
        rows = plans.rows(tick.work.microbatch)
        h = _attend(ticks.plan, rows).flatten(1)
        if plans.stage == 0:
            return h.sum() + _attend(ticks.plan, rows).sum()
        return (h if wrong else ticks.pad(h)).sum()

    _iterate(Ticks(plans, context=context), forward=forward)


@mistake(r'"tick 0 of 10, forward" on rank 3|"tick 0 of 8, forward" on rank [012]')
def a_rank_has_a_micro_batch_more(context: distca.Context, wrong: bool) -> None:
    _iterate(Ticks(_plans(context, microbatches=4 if wrong else 3), context=context))


@mistake("tick 1 of 8, forward: this stage has work, Work.microbatch=0, chunk=0.")
def a_stage_with_work_serves(context: distca.Context, wrong: bool) -> None:
    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        if wrong:
            tick.serve()
        return _forward(ticks, tick)

    _iterate(Ticks(_plans(context), context=context), forward=forward)


@mistake("tick 0 of 8, forward: stage 1 has no work in it; call tick.serve")
def a_model_is_called_in_a_tick_without_work(context: distca.Context, wrong: bool) -> None:
    ticks = Ticks(_plans(context), context=context)
    _iterate(ticks, serve=lambda tick: _attend(ticks.plan, 0) if wrong else tick.serve())


@mistake(
    "tick 1 of 8, forward: the model runs in distca.PingPong, and the plans have no halves. What to change: .*halves="
)
def a_model_takes_turns_with_itself(context: distca.Context, wrong: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
            return _forward(ticks, tick)

    def forward(ticks: Ticks, tick: CurrentTick) -> torch.Tensor:
        if wrong:
            return sum(distca.PingPong(Model())((ticks, tick), (ticks, tick)))
        return _forward(ticks, tick)

    _iterate(Ticks(_plans(context), context=context), forward=forward)


@mistake("no tick is under way")
def a_model_is_called_outside_of_all_ticks(context: distca.Context, wrong: bool) -> None:
    ticks = Ticks(_plans(context), context=context)
    if wrong:
        _attend(ticks.plan, 0)
    _iterate(ticks)


@mistake("tick 1 of 8, forward|documents of other lengths, on other ranks, or with other bidirectional rows")
def a_micro_batch_differs_on_a_rank(context: distca.Context, wrong: bool) -> None:
    plans = _plans(context)
    if wrong:
        layouts = [distca.Layout.from_documents([[40 + 8 * i], [30 + 8 * i, 10]]) for i in range(3)]
        plans = PipelinePlans(layouts, HEADS, stages=[[0, 1], [2, 3]], layers=LAYERS, context=context, min_rows=8)
    _iterate(Ticks(plans, context=context))


@pytest.fixture(scope="module")
def told() -> dict[str, list[Told]]:
    """For each mistake of rank 3 what each rank is told."""
    return mistake.told(HEADS, ranks=4, wrong_rank=3)


def test_no_mistake_no_error(told: dict[str, list[Told]]) -> None:
    assert [kind for kind, _, _ in told["none_at_all"]] == [""] * 4


@pytest.mark.parametrize("name", [name for name in mistake if name != "none_at_all"])
def test_all_ranks_are_told_at_once(told: dict[str, list[Told]], name: str) -> None:
    mistake.assert_told_at_once(name, told[name])


def test_frozen_layers_are_told_what_to_change() -> None:
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        plans = PipelinePlans([distca.Layout.from_documents([[8]])], HEADS, stages=[[0]], layers=2, context=context)

        def run(*needs_gradient: bool) -> None:
            ticks = Ticks(plans, context=context)

            def stage(work: Any, x: Any) -> torch.Tensor:
                outs = [_attend(ticks.plan, 8, context=context) for _ in needs_gradient]
                return sum(
                    out.sum() if needs else out.sum().detach() for out, needs in zip(outs, needs_gradient, strict=True)
                )

            ticks.run(stage, like=torch.empty(0, 1))

        run(True, True)
        with pytest.raises(distca.InvalidArgumentError, match=r"tick 1 of 2, backward: .* requires_grad_\(\) on it"):
            run(False, True)


def test_a_stage_whose_weights_are_all_frozen_is_told_what_to_change() -> None:
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        plans = PipelinePlans([distca.Layout.from_documents([[8]])], HEADS, stages=[[0]], layers=1, context=context)
        ticks = Ticks(plans, context=context)
        with pytest.raises(distca.InvalidArgumentError, match="tick 0 of 2, forward: .* stage 0 needs no gradient. .*"):
            ticks.run(lambda work, x: _attend(ticks.plan, 8, context=context).sum().detach(), like=torch.empty(0, 1))
        with pytest.raises(distca.InvalidArgumentError, match=r"Ticks: unknown \['softcaps'\]"):
            Ticks(plans, context=context, softcaps=1.0)


def test_ticks_are_over_when_their_loop_is_left() -> None:
    """An error that is kept keeps the frames of the loop."""
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        plans = PipelinePlans([distca.Layout.from_documents([[8]])], HEADS, stages=[[0]], layers=1, context=context)
        ticks = Ticks(plans, context=context)

        def stage(work: Any, x: Any) -> torch.Tensor:
            raise ValueError("a bad sample")

        for _ in ticks:
            break
        with pytest.raises(distca.InvalidArgumentError, match="no tick is under way"):
            assert ticks.current
        with pytest.raises(ValueError, match="a bad sample") as kept:
            ticks.run(stage, like=torch.empty(0, 1))
        with pytest.raises(distca.InvalidArgumentError, match="no tick is under way"):
            assert ticks.current
        assert kept.value.__traceback__ is not None


def test_a_loop_that_is_closed_late_does_not_end_the_next_one() -> None:
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        plans = PipelinePlans([distca.Layout.from_documents([[8]])], HEADS, stages=[[0]], layers=1, context=context)
        ticks = Ticks(plans, context=context)
        left, under_way = iter(ticks), iter(ticks)
        next(left)
        tick = next(under_way)
        left.close()
        assert ticks.current is tick
        under_way.close()


WRONG = {
    "scale": ("a", "scale = 'a'; a number is expected"),
    "softcap": (-1, "Ticks: softcap = -1.0; None, 0 .none. or a positive"),
    "save_attention": ("x", "Ticks: save_attention is 'x'; True or False"),
    "deterministic": (1, "Ticks: deterministic is 1; True or False"),
    "max_logits": (None, "Ticks: max_logits is None; True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_option_of_ticks_with_a_wrong_value_is_refused(name: str) -> None:
    value, message = WRONG[name]
    (context,) = distca.loopback(1, max_tokens=64, heads=HEADS)
    with context:
        plans = PipelinePlans([distca.Layout.from_documents([[8]])], HEADS, stages=[[0]], layers=1, context=context)
        with pytest.raises(distca.InvalidArgumentError, match=message):
            Ticks(plans, context=context, **{name: value})
