"""Calls in modes of PyTorch and with arguments that go well elsewhere: right gradients, or an error before the step."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from support.groups import loopback_group, on_all_ranks

HEADS = distca.Heads(4, 2, 16)
LAYOUT = distca.Layout.from_documents([[70, 28]])
ROWS = 98


@pytest.fixture
def context() -> Iterator[distca.Context]:
    with distca.init(max_tokens=ROWS, heads=HEADS) as context:
        yield context


@pytest.fixture
def plan(context: distca.Context) -> distca.Plan:
    return distca.plan(LAYOUT, HEADS)


def _inputs(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def _in_parts(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return distca.core_attention(q, k, v, plan.for_parts(), **options)


def _dispatched(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    step = distca.dispatch(q, k, v, plan, **options)
    distca.attend(step)
    return distca.collect(step)


def _local(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return distca.attention(q, k, v, **options)


CALLS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "whole": distca.core_attention,
    "in parts": _in_parts,
    "dispatch, attend, collect": _dispatched,
    "local": _local,
}
every_call = pytest.mark.parametrize("call", CALLS)


# ---- scale and softcap that are tensors


@every_call
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_tensor_that_changes_before_backward_is_the_number_that_it_was(
    plan: distca.Plan, call: str, name: str
) -> None:
    gradients = []
    for value in (0.3, torch.tensor(0.3), torch.tensor([[0.3]], dtype=torch.float64)):
        inputs = _inputs()
        out, _ = CALLS[call](*inputs, plan, **{name: value})
        if isinstance(value, torch.Tensor):
            value.mul_(4)
        out.square().sum().backward()
        gradients.append([t.grad for t in inputs])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


@every_call
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_would_need_a_gradient_is_refused(
    context: distca.Context, plan: distca.Plan, call: str, name: str
) -> None:
    leaf = torch.nn.Parameter(torch.tensor(0.3))
    for value in (leaf, leaf.exp()):
        with pytest.raises(distca.InvalidArgumentError, match=f"{name} is a tensor that needs a gradient"):
            CALLS[call](*_inputs(), plan, **{name: value})
    with pytest.raises(distca.InvalidArgumentError, match=rf"{name} has shape \[2\]; a number is expected"):
        CALLS[call](*_inputs(), plan, **{name: torch.tensor([0.3, 0.4])})
    assert context.step == 0


def test_scores_of_documents_are_numbers_too() -> None:
    value = torch.tensor(0.25)
    plan = distca.plan(LAYOUT, HEADS, scores=[distca.Scores(scale=value, softcap=torch.tensor(2.0))] * 2)
    same = distca.plan(LAYOUT, HEADS, scores=[distca.Scores(scale=0.25, softcap=2.0)] * 2)
    value.mul_(3)
    assert plan.digest == same.digest
    with pytest.raises(distca.InvalidArgumentError, match="scale = Parameter"):
        distca.plan(LAYOUT, HEADS, scores=[distca.Scores(scale=torch.nn.Parameter(value))] * 2)


# ---- modes that differ between the parts of a step


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("part", ["attend", "collect"])
def test_dispatch_decides_whether_a_step_has_gradients(plan: distca.Plan, mode: Any, part: str) -> None:
    def step(mode_of: dict[str, Any]) -> list[torch.Tensor]:
        inputs = _inputs()
        under_way = distca.dispatch(*inputs, plan)
        with mode_of.get("attend", torch.enable_grad)():
            distca.attend(under_way)
        with mode_of.get("collect", torch.enable_grad)():
            out, lse = distca.collect(under_way)
        (inputs[0].sum() + out.square().sum() + lse.sum()).backward()
        return [t.grad for t in inputs]

    assert all(torch.equal(a, b) for a, b in zip(step({part: mode}), step({}), strict=True))


def test_a_step_that_is_dispatched_without_gradients_has_none(plan: distca.Plan) -> None:
    with torch.no_grad():
        under_way = distca.dispatch(*_inputs(), plan)
    distca.attend(under_way)
    assert not distca.collect(under_way)[0].requires_grad


# ---- activation checkpointing around steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_around_a_step_that_needs_no_gradient_goes_on_to_its_end(ranks: int) -> None:
    """What is recomputed ends with the last tensor that was saved, which must not be between dispatch and collect."""
    layout = distca.Layout([[(0, 98 // ranks * rank, 98 // ranks * (rank + 1))] for rank in range(ranks)])
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        rows = 98 // ranks
        q, k, v = (t.detach()[:rows] for t in _inputs())
        linear = torch.nn.Linear(64, 64)

        def block(x: torch.Tensor) -> torch.Tensor:
            step = distca.dispatch(q, k, v, plan.for_rank(rank), context=context)
            y = linear(x).sin()
            distca.attend(step)
            return y + distca.collect(step)[0].flatten(1)

        for _ in range(2):
            checkpoint(block, torch.randn(rows, 64), use_reentrant=False).sum().backward()
        context.check()
        return linear.weight.grad

    with loopback_group(plan) as contexts:
        assert all(gradient.any() for gradient in on_all_ranks(contexts, work))


def test_a_backward_pass_inside_another_leaves_that_one_s_steps_alone(plan: distca.Plan) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.split([4, 2, 2], 1)
        out, _ = distca.core_attention(q, k, v, plan.for_parts())
        return torch.cat([out, k, v], 1)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, x, use_reentrant=False)

    gradients = []
    for nested in (False, True):
        x, y = (torch.cat(_inputs(seed), 1).detach().requires_grad_() for seed in (1, 2))
        step = distca.dispatch(*x.split([4, 2, 2], 1), plan)
        distca.attend(step)
        other = checkpoint(inner, y, use_reentrant=True) if nested else inner(y)
        out, _ = distca.collect(step)
        (out.square().sum() + other.square().sum()).backward()
        gradients.append([x.grad, y.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- inference mode, default devices, DTensors


@every_call
def test_a_plan_that_was_made_in_inference_mode_is_trained_with(context: distca.Context, call: str) -> None:
    with torch.inference_mode():
        plan = distca.plan(LAYOUT, HEADS).for_rank(0)
        copied = torch.load(_saved(plan), weights_only=False)
    for one in (plan, copied):
        inputs = _inputs()
        CALLS[call](*inputs, one)[0].sum().backward()
        assert inputs[0].grad is not None


def _saved(plan: distca.Plan) -> Any:
    file = io.BytesIO()
    torch.save(plan, file)
    file.seek(0)
    return file


@every_call
def test_rows_of_inference_mode_that_backward_would_keep_are_refused_before_the_step(
    context: distca.Context, plan: distca.Plan, call: str
) -> None:
    q, k, v = _inputs()
    with torch.inference_mode():
        made = k.clone()
    with pytest.raises(distca.InvalidArgumentError, match="k was made in torch.inference_mode.* pass k.clone"):
        CALLS[call](q, made, v, plan)
    assert context.step == 0
    with torch.no_grad():
        CALLS[call](q, made, v, plan)


@every_call
def test_a_default_device_is_of_no_account(plan: distca.Plan, call: str) -> None:
    inputs = _inputs()
    with torch.device("meta"):
        out, _ = CALLS[call](*inputs, plan)
    out.sum().backward()
    assert out.device.type == "cpu" and inputs[0].grad is not None


class _LikeDTensor(torch.Tensor):
    device_mesh = None


@every_call
def test_distributed_tensors_are_refused_by_name(plan: distca.Plan, call: str) -> None:
    q, k, v = _inputs()
    with pytest.raises(
        distca.InvalidArgumentError, match=r"v is a DTensor; pass this rank's part of it, v.to_local\(\)"
    ):
        CALLS[call](q, k, v.detach().as_subclass(_LikeDTensor), plan)
