"""What ping-pong cannot run is refused with the reason, and an error in one half names the step that it leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import distca
from distca.integrations import hf  # noqa: F401
from support.groups import loopback_group, outcomes
from support.halves import Model, halves_for, one_after_the_other, ping_pong, plans_for, seeded
from support.train_runs import one_rank


def _alone(make: Callable[[distca.Context], Any]) -> None:
    plans = plans_for(1)
    with loopback_group(plans) as [context]:
        make(context)(*halves_for(plans, context))


class Calls(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **half: Any) -> Any:
        return self.inner(half, half)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_ping_pong_itself_is_not_compiled(fullgraph: bool) -> None:
    torch._dynamo.reset()
    kind = Exception if fullgraph else distca.InvalidArgumentError  # torch wraps errors that it meets in a whole graph
    with pytest.raises(kind, match="PingPong is called in compiled code, and no graph can hold two forward passes"):
        _alone(lambda context: torch.compile(distca.PingPong(Model()), backend="eager", fullgraph=fullgraph))


def test_a_whole_graph_of_a_layer_in_a_half_is_refused_with_the_reason() -> None:
    torch._dynamo.reset()
    model = Model()
    model.layers[1].compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="between two graphs: leave out fullgraph=True"):
        _alone(lambda context: distca.PingPong(model))


def test_a_ping_pong_in_a_half_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="a half calls another PingPong"):
        _alone(lambda context: distca.PingPong(Calls(distca.PingPong(Model()))))


def test_fsdp2_of_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distca.pingpong.ping_pong.torch.__version__", "2.12.1+cpu")
    with one_rank():
        model = Model()
        fully_shard(model.layers[0])
        with pytest.raises(
            distca.InvalidArgumentError, match=r"FSDP2 of torch 2\.12\.1.*torch 2\.13 or later is needed"
        ):
            _alone(lambda context: distca.PingPong(model))


@pytest.mark.parametrize("how", ["FSDP1", "ZeRO-3 of DeepSpeed"])
def test_weights_that_are_freed_between_the_halves_are_refused(how: str) -> None:
    """The half that leaves a module first would free them, while the other one is still in the module."""
    with one_rank():
        model = Model()
        if how == "FSDP1":
            model.layers[0] = FullyShardedDataParallel(model.layers[0], device_id=torch.device("cpu"))
        else:
            model.layers[0].sinks = torch.nn.Parameter(torch.zeros(4))
            model.layers[0].sinks.ds_status = "NOT_AVAILABLE"  # as deepspeed.initialize does
        with pytest.raises(distca.InvalidArgumentError, match=rf"layers\.0 \(\w+\) are sharded by {how}, which frees"):
            _alone(lambda context: distca.PingPong(model))


def test_without_greenlet_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ImportError, match=r"pip install greenlet"):
        distca.PingPong(Model())


def test_a_rank_without_ping_pong_among_others_with_it_is_a_mismatch_on_all() -> None:
    plans = plans_for(3)

    def work(rank: int, context: distca.Context) -> None:
        (one_after_the_other if rank == 1 else ping_pong)(seeded(Model), halves_for(plans, context))

    with loopback_group(plans, timeout=20.0) as contexts:
        errors = outcomes(contexts, work)
    assert all(isinstance(error, distca.PlanMismatchError) for error in errors), errors


class Fails(Model):
    def forward(self, x: torch.Tensor, plan: distca.Plan, context: Any, fail: bool = False) -> torch.Tensor:  # type: ignore[override]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), torch.no_grad():
            x = self.layers[0](x, plan, context)
            if fail:
                raise ValueError("half way")
            return self.layers[1](x, plan, context)


class Infers(Model):
    def forward(self, x: torch.Tensor, plan: distca.Plan, context: Any, infer: bool = False) -> torch.Tensor:  # type: ignore[override]
        with torch.inference_mode() if infer else contextlib.nullcontext():
            return super().forward(x, plan, context)


def test_an_inference_mode_of_one_half_alone_is_refused_and_left() -> None:
    plans = plans_for(1)
    for half in range(2):
        with loopback_group(plans) as [context]:
            halves = halves_for(plans, context)
            halves[half]["infer"] = True
            with pytest.raises(distca.InvalidArgumentError, match=r"inside torch.inference_mode\(\) of its own"):
                ping_pong(Infers(), halves)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


@pytest.fixture
def thread_state() -> Iterator[None]:
    before = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    yield
    assert before == (torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting())
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize("half", [0, 1])
def test_an_error_in_a_half_on_one_rank_is_raised_there_and_names_the_step_it_leaves_to_the_others(
    half: int, thread_state: None
) -> None:
    plans = plans_for(2)

    def work(rank: int, context: distca.Context) -> None:
        halves = halves_for(plans, context)
        halves[half]["fail"] = rank == 0
        try:
            ping_pong(seeded(Fails), halves)
        finally:
            assert torch.is_grad_enabled()

    with loopback_group(plans, timeout=20.0) as contexts:
        here, there = outcomes(contexts, work)
        assert isinstance(here, ValueError)
        assert isinstance(there, distca.PeerLeftError) and "rank 0 left step" in str(there), there
        with pytest.raises(distca.ContextPoisonedError, match="ValueError: half way"):
            one_after_the_other(Model(), halves_for(plans, contexts[0]))
