"""torch.ops.distca: schemas, fake kernels, autograd, and the registry that operators and module share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal import optests

import distca
from distca import _C
from support.batches import random_batch
from support.groups import compute, loopback_group
from support.oracle import NAMES, oracle

LENGTHS = (70, 1, 33)
HEADS = [distca.Heads(4, 2, 16, 24), distca.Heads(4, 1, 8, None, torch.bfloat16)]


@pytest.fixture(params=HEADS, ids=["fp32", "bf16"])
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[distca.Context, distca.Plan]]:
    """A context of one rank with its own name, and a plan for it."""
    plan = distca.plan(distca.Layout.from_documents([LENGTHS]), request.param)
    with distca.init(max_tokens=sum(LENGTHS), heads=request.param, name="test_ops") as context:
        yield context, plan


def _inputs(heads: distca.Heads, grad: bool = True) -> tuple[torch.Tensor, ...]:
    batch = random_batch(LENGTHS, heads, 1)
    return tuple(t.requires_grad_(grad) for t in (batch.q, batch.k, batch.v))


def _opcheck(operator: Any, inputs: tuple[torch.Tensor, ...], tables: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Checks the operator, also as differentiated in all its outputs together and in each of them alone."""
    torch.library.opcheck(operator, (*inputs, *tables), options)
    differentiable = tuple(t.detach().requires_grad_() for t in inputs)
    tables = tuple(  # sinks are differentiable too
        t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in tables
    )
    torch.library.opcheck(operator, (*differentiable, *tables), options)
    for index, dynamic in itertools.product((0, 1), (False, True)):
        optests.aot_autograd_check(
            lambda *tensors, index=index: operator(*tensors, **options)[index],
            (*differentiable, *tables),
            {},
            dynamic=dynamic,
        )


def test_core_attention_passes_opcheck(alone: tuple[distca.Context, distca.Plan]) -> None:
    context, plan = alone
    inputs = _inputs(plan.heads, grad=False)
    operator = torch.ops.distca.core_attention.default
    _opcheck(operator, inputs, (plan.tensor,), {"context": context.name})
    _opcheck(operator, inputs, (plan.tensor, plan.tensor), {"context": context.name, "scale": 0.5})
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    _opcheck(operator, inputs, (plan.tensor, None, sinks), {"context": context.name, "softcap": 4.0})
    retain = torch.ops.distca.core_attention_all.default
    torch.library.opcheck(retain, (*inputs, plan.tensor), {"context": context.name, "retained_bytes": 0})


@pytest.mark.parametrize("heads", HEADS, ids=["fp32", "bf16"])
def test_attention_passes_opcheck(heads: distca.Heads) -> None:
    operator = torch.ops.distca.attention.default
    tasks = torch.tensor([[0, 70, 0, 70], [71, 104, 71, 104]])
    _opcheck(operator, _inputs(heads, grad=False), (tasks,), {"scale": 0.25})
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    _opcheck(operator, _inputs(heads, grad=False), (tasks, sinks), {"softcap": 4.0})
    _opcheck(operator, _inputs(heads, grad=False), (tasks,), {"window": 9})
    torch.library.opcheck(operator, (*_inputs(heads, grad=False), tasks), {"mask": "full"})
    fused = torch.zeros(104, heads.q + 2, heads.dim + 3, dtype=heads.dtype)[:, :, : heads.dim]
    _opcheck(operator, (fused[:, : heads.q], fused[:, -2:-1], fused[:, -1:]), (tasks,), {})


def test_backward_operators_pass_opcheck(alone: tuple[distca.Context, distca.Plan]) -> None:
    context, plan = alone
    q, k, v = _inputs(plan.heads, grad=False)
    out, lse = distca.core_attention(q, k, v, plan, context=context)
    saved = (torch.ones_like(out), q, k, v, out, lse)
    torch.library.opcheck(
        torch.ops.distca.core_attention_backward.default, (*saved, plan.tensor), {"context": context.name}
    )
    torch.library.opcheck(
        torch.ops.distca.core_attention_backward.default,
        (*saved, plan.tensor),
        {"context": context.name, "dlse": torch.ones_like(lse)},
    )
    tasks = torch.tensor([[0, 70, 0, 70], [70, 71, 70, 71], [71, 104, 71, 104]])
    torch.library.opcheck(torch.ops.distca.attention_backward.default, (*saved, tasks))
    torch.library.opcheck(
        torch.ops.distca.attention_backward.default, (*saved, tasks), {"dlse": lse.new_ones(()).expand(lse.shape)}
    )
    sinks = torch.zeros(plan.heads.q)
    torch.library.opcheck(torch.ops.distca.sink_gradient.default, (saved[0], out, lse, sinks, torch.ones_like(lse)))


def test_schemas_have_every_argument_of_the_contract_with_its_default() -> None:
    schema = torch.ops.distca.core_attention.default._schema
    arguments = {a.name: (str(a.type), a.default_value) for a in schema.arguments}
    assert arguments == {
        "q": ("Tensor", None),
        "k": ("Tensor", None),
        "v": ("Tensor", None),
        "plan": ("Tensor", None),
        "plan_backward": ("Optional[Tensor]", None),
        "context": ("str", "default"),
        "scale": ("Optional[float]", None),
        "softcap": ("float", 0.0),
        "sinks": ("Optional[Tensor]", None),
        "deterministic": ("bool", False),
    }
    assert [a.name for a in schema.arguments[:4]] == ["q", "k", "v", "plan"]
    assert [r.name for r in schema.returns] == ["out", "lse"]
    assert not schema.is_mutable


@pytest.mark.parametrize("heads", HEADS, ids=["fp32", "bf16"])
def test_fake_kernels_promise_the_shapes_dtypes_and_strides_that_the_kernels_give(heads: distca.Heads) -> None:
    real = [*_inputs(heads, grad=False)]
    tasks = torch.tensor([[0, 104, 0, 104]])
    out, lse = torch.ops.distca.attention(*real, tasks)
    grads = torch.ops.distca.attention_backward(torch.ones_like(out), *real, out, lse, tasks)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in real]
        fake_out, fake_lse = torch.ops.distca.attention(*fakes, tasks)
        core_out, core_lse = torch.ops.distca.core_attention(*fakes, tasks, context="nobody")
        *_, kept, largest = torch.ops.distca.core_attention_all(*fakes, tasks, context="nobody", retained_bytes=640)
        assert (kept.shape, kept.dtype, largest.shape) == ((640,), torch.uint8, (0,))
        fake_grads = torch.ops.distca.attention_backward(fake_out, *fakes, fake_out, fake_lse, tasks)
        core_grads = torch.ops.distca.core_attention_backward(
            fake_out, *fakes, fake_out, fake_lse, tasks, context="nobody"
        )
    for fake, core, kernel in zip(
        (fake_out, fake_lse, *fake_grads), (core_out, core_lse, *core_grads), (out, lse, *grads), strict=True
    ):
        for t in (fake, core):
            assert (t.shape, t.dtype, t.stride()) == (kernel.shape, kernel.dtype, kernel.stride())


def test_the_operator_finds_by_name_a_context_that_the_module_made() -> None:
    heads = HEADS[0]
    plan = distca.plan(distca.Layout.from_documents([LENGTHS]), heads)
    [core] = _C.make_loopback(names=["made by _C"], slot_bytes=64, timeout=10.0, cost=distca.CostModel().core)
    try:
        q, k, v = _inputs(heads, grad=False)
        out, lse = torch.ops.distca.core_attention(q, k, v, plan.tensor, context="made by _C")
        assert core.step == 1
        reference = oracle(random_batch(LENGTHS, heads, 1))
        torch.testing.assert_close(out.double(), reference[0], rtol=1e-5, atol=1e-5)
    finally:
        _C.remove_context("made by _C")


def test_the_default_context_needs_no_name() -> None:
    heads = HEADS[0]
    with distca.init(max_tokens=sum(LENGTHS), heads=heads) as context:
        assert distca.get_context() is context
        plan = distca.plan(distca.Layout.from_documents([LENGTHS]), heads)
        out, _ = distca.core_attention(*_inputs(heads), plan)
        assert context.step == 1
    assert distca.get_context() is None
    torch.testing.assert_close(out.double(), oracle(random_batch(LENGTHS, heads, 1))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_gradient_of_one_input_alone_is_the_one_that_comes_with_all(
    alone: tuple[distca.Context, distca.Plan], wanted: int
) -> None:
    context, plan = alone
    batch = random_batch(LENGTHS, plan.heads, 1)
    inputs = [batch.q, batch.k, batch.v]
    inputs[wanted].requires_grad_()
    out, _ = distca.core_attention(*inputs, plan, context=context)
    out.backward(batch.dout)
    assert torch.equal(inputs[wanted].grad, compute(random_batch(LENGTHS, plan.heads, 1), plan)[2 + wanted])
    assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)


def test_without_gradients_nothing_is_kept(alone: tuple[distca.Context, distca.Plan]) -> None:
    context, plan = alone
    q, k, v = _inputs(plan.heads)
    with_graph, _ = distca.core_attention(q, k, v, plan, context=context)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = distca.core_attention(q, k, v, plan, context=context)
        assert out.grad_fn is None and not out.requires_grad and not lse.requires_grad
        assert torch.equal(out, with_graph)


def test_a_checkpointed_call_gives_the_same_gradients_in_one_more_step(
    alone: tuple[distca.Context, distca.Plan],
) -> None:
    context, plan = alone
    batch = random_batch(LENGTHS, plan.heads, 1)
    q, k, v = _inputs(plan.heads)
    out = torch.utils.checkpoint.checkpoint(
        lambda *qkv: distca.core_attention(*qkv, plan, context=context)[0], q, k, v, use_reentrant=False
    )
    out.backward(batch.dout)
    assert context.step == 3
    for name, a, b in zip(NAMES[2:], (q.grad, k.grad, v.grad), compute(batch, plan)[2:], strict=True):
        assert torch.equal(a, b), name


def test_inputs_and_plan_are_never_written() -> None:
    heads = HEADS[0]
    batch = random_batch(LENGTHS, heads, 1)
    plan = distca.plan(distca.Layout.from_documents([LENGTHS]), heads)
    with loopback_group(plan) as [context]:
        inputs = [batch.q, batch.k, batch.v, batch.dout, plan.tensor]
        before = [t.clone() for t in inputs]
        versions = [t._version for t in inputs]
        q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
        out, lse = distca.core_attention(q, k, v, plan, context=context)
        kept = out.detach().clone(), lse.clone()
        out.backward(batch.dout)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert [t._version for t in inputs] == versions
    assert torch.equal(out, kept[0]) and torch.equal(lse, kept[1])
