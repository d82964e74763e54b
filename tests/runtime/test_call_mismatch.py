"""Ranks whose calls differ, or are not of one layer: every rank is told the step, the layer and what to change.

test_hf_mistakes.py has models of transformers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from distca.testing import _emulation
from support.groups import ADVICE, loopback_group, on_all_ranks, outcomes
from support.processes import Group, connect, fault_of, plan_for, tensors_for
from support.torch_ranks import join, over_torch, torch_group


def _call(plan: distca.Plan, context: distca.Context, actions: list[str]) -> None:
    """Runs forwards through numbered layers ("attend 0", "checkpointed 0"), and the backward of all ("backward")."""
    rows, k, v, _ = tensors_for(plan)

    def attend(rows: torch.Tensor, layer: str) -> torch.Tensor:
        return distca.core_attention(rows, k, v, plan, context=context, layer=layer)[0]

    for action in actions:
        name, _, layer = action.partition(" ")
        if name == "backward":
            rows.sum().backward()
        elif name == "checkpointed":
            rows = checkpoint(attend, rows, layer, use_reentrant=False)
        else:
            rows = attend(rows, layer)


def _run(rank: int, ranks: int, pipe: Connection, scripts: list[list[str]]) -> None:
    with connect(rank, pipe) as context:
        pipe.send(fault_of(lambda: _call(plan_for(ranks, rank), context, scripts[rank])))


# The calls of ranks 0 and 1, and the layer and step at which each rank is stopped.
DIFFERENT_CALLS = {
    "a layer more on one rank": (
        (["attend 0", "attend 1", "attend 2", "backward"], ["attend 0", "attend 1", "backward"]),
        (("layer 2", "step 3 (forward)"), ("layer 1", "step 3 (backward)")),
    ),
    "forward alone on one rank, backward too on the other": (
        (["attend 0", "attend 1", "attend 0"], ["attend 0", "attend 1", "backward"]),
        (("layer 0", "step 3 (forward)"), ("layer 1", "step 3 (backward)")),
    ),
}
CHECKPOINTED_CALLS = {
    "checkpointing on one rank": (
        (["checkpointed 0", "checkpointed 1", "backward"], ["attend 0", "attend 1", "backward"]),
        (("layer 1", "step 3 (forward)"), ("layer 1", "step 3 (backward)")),
    ),
    "checkpointing on both, a layer more on one": (
        (["checkpointed 0", "backward"], ["checkpointed 0", "checkpointed 1", "backward"]),
        (("layer 0", "step 2 (forward)"), ("layer 1", "step 2 (forward)")),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT_CALLS)
def test_different_calls_of_two_processes_are_an_error_on_both_with_step_and_layer(name: str) -> None:
    scripts, expected = DIFFERENT_CALLS[name]
    with Group(_run, 2, list(scripts)) as group:
        group.exchange_addresses()
        for rank, (layer, step) in enumerate(expected):
            kind, message = group.receive(rank)
            assert kind == "PlanMismatchError", (kind, message)
            assert message.startswith(f'{layer}: context "default", rank {rank} of 2, {step}: '), message
            assert message.endswith(ADVICE), message


@pytest.mark.parametrize("name", CHECKPOINTED_CALLS)
def test_different_calls_under_checkpointing_are_an_error_on_both_with_step_and_layer(name: str) -> None:
    scripts, expected = CHECKPOINTED_CALLS[name]
    plan = plan_for(2, 0)
    with loopback_group(plan, timeout=20.0) as contexts:
        errors = outcomes(contexts, lambda rank, context: _call(plan.for_rank(rank), context, scripts[rank]))
    for rank, (layer, step) in enumerate(expected):
        assert isinstance(errors[rank], distca.PlanMismatchError), errors[rank]
        message = str(errors[rank])
        assert message.startswith(f"{layer}: context ") and f"rank {rank} of 2, {step}: " in message, message
        assert message.endswith(ADVICE), message


def test_a_call_more_after_the_other_rank_has_left_names_it_with_step_and_layer() -> None:
    with Group(_run, 2, [["attend 0", "backward"], ["attend 0", "backward", "attend 4"]]) as group:
        group.exchange_addresses()
        assert group.receive(0) == ("", "")
        kind, message = group.receive(1)
        assert kind == "PeerLeftError"
        assert message.startswith(
            'layer 4: context "default", rank 1 of 2, step 3 (forward): rank 0 closed its context'
        )


def test_serving_names_its_layer_too() -> None:
    heads = distca.Heads(2, 1, 8)
    plan = distca.plan(distca.Layout.from_documents([[40], []]), heads, servers=[1], rank=1)
    with loopback_group(plan, timeout=0.2) as contexts, pytest.raises(distca.PeerTimeoutError) as caught:
        distca.serve(plan, "backward", context=contexts[1], layer=7)
    assert str(caught.value).startswith("layer 7: ")


def test_a_layer_is_named_in_the_error_of_any_argument_and_not_in_that_of_an_abandoned_context() -> None:
    heads = distca.Heads(2, 1, 8)
    plan = distca.plan(distca.Layout.from_documents([[20], [20]]), heads, rank=0)
    q, k, v = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8)
    with loopback_group(plan) as contexts:
        with pytest.raises(distca.InvalidArgumentError, match="^layer decoder.5: plan is of another layout"):
            distca.core_attention(q, k, v, plan, context=contexts[0], layer="decoder.5")
        _emulation.mark_died(contexts[1]._core)
        inputs = [torch.zeros(20, *t.shape[1:]) for t in (q, k, v)]
        with pytest.raises(distca.PeerDiedError, match="^layer 1: "):
            distca.core_attention(*inputs, plan, context=contexts[0], layer=1)
        with pytest.raises(distca.ContextPoisonedError, match="^context .* rank 1 died"):
            distca.core_attention(*inputs, plan, context=contexts[0], layer=2)


# ---- ranks that call different layers with one plan


def _attend_in_parts(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    step = distca.dispatch(q, *args, **options)
    distca.attend(step)
    return distca.collect(step)[0]


def _through(layers: Sequence[int | str | None], plan: distca.Plan, context: distca.Context, in_parts: bool) -> None:
    """Forward through these layers, then the backward of all. Without a mistake, nothing but the layers differs."""
    rows, k, v, _ = tensors_for(plan)
    for layer in layers:
        if in_parts:
            rows = _attend_in_parts(rows, k, v, plan, context=context, layer=layer)
        else:
            rows = distca.core_attention(rows, k, v, plan, context=context, layer=layer)[0]
    rows.sum().backward()


def _through_layers(rank: int, ranks: int, pipe: Connection, layers: list[Any], in_parts: bool) -> None:
    with connect(rank, pipe) as context:
        pipe.send(fault_of(lambda: _through(layers[rank], plan_for(ranks, rank), context, in_parts)))


def _through_layers_over_torch(
    rank: int, ranks: int, pipe: Connection, port: int, layers: list[Any], in_parts: bool
) -> None:
    join(rank, ranks, port)
    with over_torch(heap_bytes=1 << 21) as context:
        pipe.send(fault_of(lambda: _through(layers[rank], plan_for(ranks, rank), context, in_parts)))
    pipe.recv()


def _backward_over_torch(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    plan, alone = plan_for(ranks, rank), threading.Barrier(1)
    with over_torch(heap_bytes=1 << 21) as context:
        of_one_layer: Any = (None, None)
        pipe.send(fault_of(lambda: _backward_in_another_order(plan, rank, context, _in_one_step, of_one_layer, alone)))
    pipe.recv()


def _faults(transport: str, layers: list[Any], in_parts: bool) -> list[tuple[str, str]]:
    ranks = len(layers)
    if transport == "torch":
        with torch_group(_through_layers_over_torch, ranks, layers, in_parts) as group:
            faults = [group.receive(rank) for rank in range(ranks)]
            group.tell("end")
            return faults
    with Group(_through_layers, ranks, layers, in_parts) as group:
        group.exchange_addresses()
        return [group.receive(rank) for rank in range(ranks)]


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_ranks_that_skip_different_layers_but_equally_many_are_told_both_layers(
    transport: str, ranks: int, in_parts: bool
) -> None:
    # The last rank skips layer 1, the others layer 2. Everything else about their calls is the same.
    layers = [[0, 1, 3]] * (ranks - 1) + [[0, 2, 3]]
    faults = _faults(transport, layers, in_parts)
    where = [re.match(r"layer (\d+): context .* step (\d) \(forward\)", message) for _, message in faults]
    for rank, (kind, message) in enumerate(faults):
        assert kind == "PlanMismatchError", message
        # A rank that waits for a slower one is told in the step before.
        found = where[rank]
        assert found and (int(found[1]), int(found[2])) in [(layers[rank][1], 2), (0, 1)], message
        assert "another layer: " in message and message.endswith(ADVICE), message
        assert f"layer 2 on rank {ranks - 1}" in message and "layer 1 on rank " in message, message
    assert any(found and found[2] == "2" for found in where), faults


def _in_one_step(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return distca.core_attention(q, *args, **options)[0]


def _by_the_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: distca.Plan, context: distca.Context, layer: None
) -> torch.Tensor:
    return torch.ops.distca.core_attention(q, k, v, plan.tensor, context=context.name)[0]


def _backward_in_another_order(
    plan: distca.Plan,
    rank: int,
    context: distca.Context,
    attend: Any,
    layers: tuple[Any, Any],
    apart: threading.Barrier,
) -> None:
    """Two forwards with one plan. Then rank 0 runs their backward passes in order, and the others do not."""
    own = plan.for_rank(rank)
    losses = []
    for seed, layer in enumerate(layers):
        rows, k, v, _ = tensors_for(own, seed=seed)
        losses.append(attend(rows, k, v, own, context=context, layer=layer).sum())
    apart.wait(20.0)
    for loss in losses if rank == 0 else reversed(losses):
        loss.backward()


@pytest.mark.parametrize("attend", [_in_one_step, _attend_in_parts])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_backward_compares_the_layers_of_its_forward(ranks: int, streams: bool, attend: Any) -> None:
    plan = plan_for(ranks, 0)
    apart = threading.Barrier(ranks)
    with loopback_group(plan, timeout=20.0, streams=streams) as contexts:
        errors = outcomes(contexts, lambda r, c: _backward_in_another_order(plan, r, c, attend, (0, 1), apart))
    for rank, error in enumerate(errors):
        assert isinstance(error, distca.PlanMismatchError), error
        assert "layer 0 on rank 0" in str(error) and "layer 1 on rank " in str(error), error
        if not streams:  # a rank whose steps are queued may be a step further by then
            assert str(error).startswith(f"layer {min(rank, 1)}: context ") and "step 3 (backward)" in str(error), error


@pytest.mark.parametrize("attend", [_in_one_step, _attend_in_parts, _by_the_operator])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_backward_passes_of_one_layer_in_another_order_are_an_error_with_both_forward_steps(
    ranks: int, streams: bool, attend: Any
) -> None:
    plan = plan_for(ranks, 0)
    apart = threading.Barrier(ranks)
    with loopback_group(plan, timeout=20.0, streams=streams) as contexts:
        errors = outcomes(contexts, lambda r, c: _backward_in_another_order(plan, r, c, attend, (None, None), apart))
    for rank, error in enumerate(errors):
        assert isinstance(error, distca.PlanMismatchError), error
        assert re.search(
            r"the backward pass of step (1 on rank 0, of step 2 on rank|2 on rank \d, of step 1)", str(error)
        )
        if not streams:  # a rank whose steps are queued may be a step further by then
            assert f"rank {rank} of {ranks}, step 3 (backward)" in str(error), error


def test_ranks_that_checkpoint_in_other_ways_but_make_the_same_calls_are_no_fault() -> None:
    """With reentrant checkpointing the gradient is that of the step that was run again, and otherwise of the first."""
    plan = plan_for(3, 0)

    def work(rank: int, context: distca.Context, reentrant: bool) -> torch.Tensor:
        own = plan.for_rank(rank)
        rows, k, v, _ = tensors_for(own)

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return distca.core_attention(rows, k, v, own, context=context)[0]

        checkpoint(attend, rows, use_reentrant=reentrant).sum().backward()
        return rows.grad

    found = []
    for in_other_ways in (True, False):
        with loopback_group(plan, timeout=20.0) as contexts:
            found.append(on_all_ranks(contexts, lambda rank, c, mix=in_other_ways: work(rank, c, mix and rank == 0)))
    for mixed, alike in zip(*found, strict=True):
        assert torch.equal(mixed, alike)


def test_backward_passes_over_the_transport_torch_are_compared_too() -> None:
    with torch_group(_backward_over_torch, 2) as group:
        for rank in range(2):
            kind, message = group.receive(rank)
            assert kind == "PlanMismatchError" and "the backward pass of step " in message, message
        group.tell("end")


def test_backward_of_a_plan_with_a_label_goes_with_any_forward_step() -> None:
    plan = distca.plan(distca.Layout.from_documents([[40], [40]]), distca.Heads(2, 1, 8), rank=0, label="tick 1")
    apart = threading.Barrier(2)
    with loopback_group(plan, timeout=20.0) as contexts:
        errors = outcomes(
            contexts, lambda r, c: _backward_in_another_order(plan, r, c, _in_one_step, (None, None), apart)
        )
    assert errors == [None, None]


@pytest.mark.parametrize(
    "layers",
    [
        [[0, 1], [None, None]],  # not every rank names its layers
        [[0, 1], [0, None], [None, 1]],
        [["0", "1 (LlamaAttention)"], [0, 1]],  # a number, with or without a class
        [["decoder.0", "decoder.1"], [0, 1]],  # a name and a number are not compared
        [["decoder.0", "decoder.1"], ["decoder.0", "decoder.1"]],
        [[2**70, -1], [2**70, -1]],
    ],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_layers_that_may_be_the_same_are_no_fault(layers: list[Any], in_parts: bool) -> None:
    plan = plan_for(len(layers), 0)
    with loopback_group(plan, timeout=20.0) as contexts:
        assert outcomes(contexts, lambda r, c: _through(layers[r], plan.for_rank(r), c, in_parts)) == [None] * len(
            layers
        )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("decoder.0", "decoder.1"), "the layers of ranks"),
        (("1 (LlamaAttention)", "2 (LlamaAttention)"), "layer 1 on rank 0"),
        ((0, 1), "layer 0 on rank 0"),
    ],
)
def test_layers_are_known_by_their_numbers_or_their_names(names: tuple[int | str, int | str], said: str) -> None:
    plan = plan_for(2, 0)
    with loopback_group(plan, timeout=20.0) as contexts:
        for error in outcomes(contexts, lambda r, c: _through([names[r]], plan.for_rank(r), c, in_parts=False)):
            assert isinstance(error, distca.PlanMismatchError) and said in str(error), error


def test_a_call_that_was_refused_leaves_its_layer_to_no_later_call() -> None:
    plan = plan_for(2, 0)
    other = plan_for(2, 0, rows=100)

    def work(rank: int, context: distca.Context) -> None:
        q, k, v, _ = tensors_for(plan.for_rank(rank))
        with pytest.raises(distca.InvalidArgumentError):
            distca.core_attention(q, k, v, other.for_rank(rank), context=context, layer=rank)
        distca.core_attention(q, k, v, plan.for_rank(rank), context=context)

    with loopback_group([plan, other], timeout=20.0) as contexts:
        assert outcomes(contexts, work) == [None, None]
