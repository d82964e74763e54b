"""Ranks whose calls differ: every rank is told the step, the layer and what to change.

test_hf_mistakes.py has models of transformers.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from distca.testing import _emulation
from support.groups import ADVICE, loopback_group, outcomes
from support.processes import Group, connect, fault_of, plan_for, tensors_for


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
        (("layer 0", "step 3 (backward)"), ("layer 1", "step 3 (forward)")),
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
