"""Core attention has no second derivative and no forward mode: both are errors where a wrong number would come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distca

HEADS = distca.Heads(2, 1, 8)
ROWS = 25
Attention = Callable[..., torch.Tensor]


@pytest.fixture
def plan() -> Iterator[distca.Plan]:
    with distca.init(max_tokens=ROWS, heads=HEADS):
        yield distca.plan(distca.Layout.from_documents([[20, 5]]), HEADS)


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(ROWS, heads, 8, generator=generator) for heads in (2, 1, 1))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), torch.zeros(2).requires_grad_()


def _both_in_parts(q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
    step = distca.dispatch(q, k, v, plan, sinks=sinks)
    distca.attend(step)
    return distca.collect(step)


def _in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, plan: Any) -> torch.Tensor:
    return _both_in_parts(q, k, v, sinks, plan)[0]


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, plan: Any) -> torch.Tensor:
    return distca.core_attention(q, k, v, plan, sinks=sinks)[0]


def _retaining(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, plan: Any) -> torch.Tensor:
    return _whole(q, k, v, sinks, distca.plan(plan.layout, HEADS, retain_bytes=2**20))


def _checkpointed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, plan: Any) -> torch.Tensor:
    return checkpoint(_whole, q, k, v, sinks, plan, use_reentrant=False)


class _Layer(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any, sinks: Any, plan: Any) -> torch.Tensor:
        return _whole(q, k, v, sinks, plan)


def _ping_pong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, plan: Any) -> torch.Tensor:
    return sum(distca.PingPong(_Layer())((q, k, v, sinks, plan), (q, k, v, sinks, plan)))


ENTRIES: dict[str, Attention] = {
    "core_attention": _whole,
    "core_attention_all": _retaining,
    "dispatch, attend, collect": _in_parts,
    "checkpointed": _checkpointed,
    "ping-pong": _ping_pong,
    "attention": lambda q, k, v, sinks, plan: distca.attention(q, k, v, sinks=sinks)[0],
    "lse of core_attention": lambda q, k, v, sinks, plan: distca.core_attention(q, k, v, plan, sinks=sinks)[1],
    "lse of a step in parts": lambda q, k, v, sinks, plan: _both_in_parts(q, k, v, sinks, plan)[1],
    "lse of attention": lambda q, k, v, sinks, plan: distca.attention(q, k, v, sinks=sinks)[1],
}
every_entry = pytest.mark.parametrize("entry", ENTRIES)
NOT_TWICE = pytest.raises(distca.InvalidArgumentError, match="derivative for distca::.* is not implemented")


@every_entry
@pytest.mark.parametrize("wanted", range(4), ids=["q", "k", "v", "sinks"])
def test_a_gradient_that_is_differentiated_again_is_an_error(plan: distca.Plan, entry: str, wanted: int) -> None:
    """The loss also has a term with a second derivative, so that autograd by itself would return something."""
    inputs = _inputs()
    out = ENTRIES[entry](*inputs, plan)
    loss = out.sum() + sum(t.pow(3).sum() for t in inputs)
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    with NOT_TWICE:
        torch.autograd.grad(gradients[wanted].pow(2).sum(), inputs[0])


@every_entry
def test_a_gradient_is_not_differentiable_in_the_gradient_of_the_output(plan: distca.Plan, entry: str) -> None:
    inputs = _inputs()
    out = ENTRIES[entry](*inputs, plan)
    weight = torch.ones_like(out).requires_grad_()
    [dq] = torch.autograd.grad(out, inputs[:1], weight, create_graph=True)
    with NOT_TWICE:
        dq.pow(2).sum().backward()


@every_entry
def test_create_graph_alone_changes_no_gradient(plan: distca.Plan, entry: str) -> None:
    inputs = _inputs()
    plain = torch.autograd.grad(ENTRIES[entry](*inputs, plan).pow(2).sum(), inputs)
    graph = torch.autograd.grad(ENTRIES[entry](*inputs, plan).pow(2).sum(), inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))


@every_entry
@pytest.mark.parametrize("wanted", range(4), ids=["q", "k", "v", "sinks"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "and a gradient"])
def test_an_input_with_a_tangent_is_refused_before_anything_moves(
    plan: distca.Plan, entry: str, wanted: int, requires_grad: bool
) -> None:
    inputs = [t.detach().requires_grad_(requires_grad) for t in _inputs()]
    context = distca.get_context()
    assert context is not None
    kinds, text = (distca.InvalidArgumentError,), "no forward-mode derivative"
    if entry == "checkpointed":  # PyTorch 2.10 has no forward mode for checkpointing, and is the first to say so
        kinds, text = (*kinds, NotImplementedError), f"{text}|You must implement the jvp function"
    refused = pytest.raises(kinds, match=text)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) if i == wanted else t for i, t in enumerate(inputs)]
        with refused:
            ENTRIES[entry](*duals, plan)
    assert context.step == 0
    ENTRIES[entry](*inputs, plan)


@pytest.mark.parametrize("entry", ["core_attention", "dispatch, attend, collect", "attention"])
def test_functional_forward_mode_is_refused(plan: distca.Plan, entry: str) -> None:
    q, *others = (t.detach() for t in _inputs())
    with pytest.raises(distca.InvalidArgumentError, match=r"no forward-mode .* use backward or torch\.autograd\.grad"):
        torch.func.jvp(lambda q: ENTRIES[entry](q, *others, plan), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("entry", ["core_attention", "dispatch, attend, collect", "attention"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian], ids=["grad", "hessian"])
def test_functional_gradients_raise_before_anything_moves(plan: distca.Plan, entry: str, transform: Any) -> None:
    """torch itself cannot apply these transforms to a Python autograd function that is written as ours."""
    q, *others = (t.detach() for t in _inputs())
    with pytest.raises(RuntimeError):
        transform(lambda q: ENTRIES[entry](q, *others, plan).pow(2).sum())(q)
    context = distca.get_context()
    assert context is not None and context.step == 0


@pytest.mark.parametrize("operator", ["core_attention", "attention"])
def test_the_operators_of_backward_are_not_differentiable_either(plan: distca.Plan, operator: str) -> None:
    q, k, v, sinks = _inputs()
    table = plan.tensor if operator == "core_attention" else torch.tensor([[0, 20, 0, 20], [20, 25, 20, 25]])
    out, lse = (t.detach() for t in getattr(torch.ops.distca, operator)(q, k, v, table, sinks=sinks))
    dout = torch.ones_like(out).requires_grad_()
    backward = getattr(torch.ops.distca, f"{operator}_backward")
    for gradients in (
        backward(dout, q, k, v, out, lse, table, sinks),
        [torch.ops.distca.sink_gradient(dout, out, lse, sinks)],
    ):
        for gradient in gradients:
            with pytest.raises(distca.InvalidArgumentError, match="derivative for distca::.* is not implemented"):
                gradient.sum().backward(retain_graph=True)
    with forward_ad.dual_level(), pytest.raises(distca.InvalidArgumentError, match="no forward-mode derivative"):
        backward(forward_ad.make_dual(dout.detach(), dout.detach()), q, k, v, out, lse, table)


def test_a_loop_over_a_batch_by_vmap_gives_what_each_call_gives(plan: distca.Plan) -> None:
    q, k, v, sinks = (t.detach() for t in _inputs())
    batch = torch.stack([q, 2 * q])
    ours = torch.vmap(lambda q: _whole(q, k, v, sinks, plan))(batch)
    assert torch.equal(ours, torch.stack([_whole(q, k, v, sinks, plan) for q in batch]))
