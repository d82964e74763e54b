"""Ping-pong of compiled models: to the bit what the same compiled model gives for both halves, one after the other.

There is one rank, or ranks are processes: torch.compile says to all threads of a process that one of them compiles.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distca
from distca.integrations import hf
from distca.pingpong.ping_pong import _Half
from support.groups import loopback_group
from support.halves import (
    HEADS,
    LENGTHS,
    Halves,
    Layer,
    Model,
    halves_for,
    one_after_the_other,
    ping_pong,
    plans_for,
    results,
    seeded,
)
from support.models import FAMILIES, VOCABULARY
from support.ranks import launch
from support.torch_features import PING_PONG_TAKES_FSDP

BF16 = distca.Heads(q=4, kv=2, dim=16, dtype=torch.bfloat16)


class FindsItsPlan(torch.nn.Module):
    """Its plans are not among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(2)])
        self.plans: list[distca.Plan] = []
        self.context = ""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.plans[number], self.context)
        return x


def _check(
    run: Any,
    halves: Halves,
    graphs: CompileCounterWithBackend,
    context: distca.Context,
    steps: int,
    repeats: int = 2,
) -> None:
    """Training steps by ping-pong and without have the same bits, both take `steps` steps of attention, and the two
    layers of both halves give two turns away each.
    """
    for _ in range(repeats):
        counts = [context.step]
        with patch.object(_Half, "pause", autospec=True, side_effect=_Half.pause) as pause:
            found = results(ping_pong, run, halves)
        assert pause.call_count == 8
        counts.append(context.step)
        expected = results(one_after_the_other, run, halves)
        counts.append(context.step)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert counts[1] - counts[0] == counts[2] - counts[1] == steps
    assert graphs.frame_count > 0
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


@pytest.fixture
def graphs(request: pytest.FixtureRequest) -> CompileCounterWithBackend:
    """Compiles, and counts what it compiles. The backend is aot_eager, or the parameter."""
    torch._dynamo.reset()
    return CompileCounterWithBackend(getattr(request, "param", "aot_eager"))


def _wrapped() -> None:
    def gradients(wrapper: str, halves: Halves, graphs: CompileCounterWithBackend | None) -> list[torch.Tensor]:
        model = seeded(Model)
        if graphs is not None:
            for layer in model.layers:
                layer.compile(backend=graphs)
        both: torch.nn.Module = distca.PingPong(model)
        if wrapper == "ddp":
            both = DistributedDataParallel(both)
        else:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            first, second = both(*halves)
            (first.square().sum() + second.square().sum()).backward()
        return [p.grad.full_tensor() if wrapper == "fsdp2" else p.grad for p in model.parameters()]

    with distca.init(transport="shm", max_tokens=256, heads=HEADS, timeout=60) as context:
        halves = halves_for(plans_for(2), context)
        for half in halves:
            half["context"] = "default"
        for wrapper in ["ddp", *(["fsdp2"] if PING_PONG_TAKES_FSDP else [])]:
            torch._dynamo.reset()
            graphs = CompileCounterWithBackend("eager")
            found, expected = (gradients(wrapper, halves, of) for of in (graphs, None))
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            assert graphs.frame_count > 0


@pytest.mark.parametrize(
    ("recompute", "cast", "dynamic", "whole"),
    [
        (None, False, None, False),
        (None, True, True, False),
        (None, False, None, True),
        ({"use_reentrant": False}, False, None, False),
    ],
    ids=["layers", "layers in autocast, dynamic", "model", "recomputed"],
)
def test_a_compiled_model_in_halves_has_the_bits_of_one_half_after_the_other(
    recompute: Any, cast: bool, dynamic: bool | None, whole: bool, graphs: CompileCounterWithBackend
) -> None:
    heads = BF16 if cast else HEADS
    plans = plans_for(1, (heads, heads))
    model = seeded(lambda: Model(layers=2))
    run: Any = torch.compile(model, backend=graphs, dynamic=dynamic) if whole else model
    for layer in () if whole else model.layers:
        layer.compile(backend=graphs, dynamic=dynamic)
    with loopback_group(plans) as [context]:
        halves = halves_for(plans, context, recompute=recompute, cast=cast)
        _check(run, halves, graphs, context, 8 if recompute is None else 12)


@pytest.mark.parametrize("graphs", ["eager"], indirect=True)
def test_compiled_layers_that_find_their_plans_elsewhere_take_turns_all_the_same(
    graphs: CompileCounterWithBackend,
) -> None:
    model, plans = seeded(FindsItsPlan), plans_for(1)
    for layer in model.layers:
        layer.compile(backend=graphs)
    with loopback_group(plans) as [context]:
        halves = halves_for(plans, context)
        model.plans, model.context = [half["plan"] for half in halves], context.name
        _check(model, [{"x": half["x"], "number": i} for i, half in enumerate(halves)], graphs, context, 8)


@pytest.mark.parametrize("graphs", ["eager"], indirect=True)
def test_compiled_layers_of_a_model_of_transformers_take_turns(graphs: CompileCounterWithBackend) -> None:
    model = seeded(lambda: FAMILIES["gpt_oss"].model("distca"))
    heads, windows = hf.heads_of(model.config, torch.float32), hf.windows_of(model.config)
    layouts = [distca.Layout.from_documents([lengths]) for lengths in LENGTHS]
    plans = [distca.plans(layout, heads, windows=windows) for layout in layouts]
    for layer in model.model.layers:
        layer.compile(backend=graphs)
    with loopback_group([plan for both in plans for plan in both.values()]) as [context]:
        halves = [
            {
                "input_ids": torch.randint(2, VOCABULARY, (1, layout.num_rows(0))),
                "position_ids": layout.position_ids(0)[None],
                "plan": plan,
                "distca_context": context.name,
                "use_cache": False,
            }
            for layout, plan in zip(layouts, plans, strict=True)
        ]
        _check(model, halves, graphs, context, 8, repeats=1)


def test_compiled_layers_of_two_ranks_under_a_wrapper_have_the_gradients_of_eager_ones() -> None:
    launch(_wrapped, ranks=2)
