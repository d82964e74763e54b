"""Ping-pong: two halves at once give, to the bit, what both give one after the other.

The expected results are those of the same model without ping-pong: both forward passes, then one backward of the sum
of the losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from distca import steps as parts
from distca.integrations import hf  # noqa: F401
from support.groups import loopback_group, on_all_ranks
from support.halves import (
    HEADS,
    LENGTHS,
    WIDTH,
    Model,
    assert_same,
    halves_for,
    one_after_the_other,
    ping_pong,
    plans_for,
    results,
    seeded,
)
from support.models import FAMILIES, GQA, VOCABULARY

BF16 = distca.Heads(q=4, kv=2, dim=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("reorder_seed", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_calls_of_the_halves_alternate_and_backward_is_their_mirror(
    ranks: int, reorder_seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[str]] = {}

    def recorded(name: str) -> None:
        method = getattr(parts._Call, name)

        def record(call: Any, *args: Any) -> Any:
            context = call.caller.context
            calls.setdefault(context, []).append(f"{name} {'AB'[call.tables[0] is not first[context]]}")
            return method(call, *args)

        monkeypatch.setattr(parts._Call, name, record)

    for name in ("dispatch", "attend", "collect", "dispatch_backward", "attend_backward", "collect_backward"):
        recorded(name)
    plans = plans_for(ranks)
    first: dict[str, torch.Tensor] = {}

    def work(rank: int, context: distca.Context) -> None:
        model = seeded(lambda: Model(layers=2))
        halves = halves_for(plans, context)
        first[context.name] = halves[0]["plan"].tensor
        assert_same(results(ping_pong, model, halves), results(one_after_the_other, model, halves))

    with loopback_group(plans, reorder_seed=reorder_seed) as contexts:
        on_all_ranks(contexts, work)
    lower = ["dispatch A", "dispatch B", "attend A", "attend B"]
    upper = ["collect A", "dispatch A", "collect B", "dispatch B", "attend A", "attend B", "collect A", "collect B"]
    forward = lower + upper
    mirror = {"dispatch": "collect_backward", "attend": "attend_backward", "collect": "dispatch_backward"}
    backward = [f"{mirror[part]} {half}" for part, half in map(str.split, reversed(forward))]
    assert len(calls) == ranks
    for made in calls.values():
        assert made == forward + backward


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_models_of_transformers_have_the_same_outputs_and_gradients(family: str, ranks: int) -> None:
    made = FAMILIES[family]
    [(window, heads)] = made.heads.items()
    per_rank = max(sum(lengths) for lengths in LENGTHS) // ranks + 1
    layouts = [distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=per_rank) for lengths in LENGTHS]
    plans = [distca.plan(layout, heads, window=window, tolerance=0.02) for layout in layouts]

    def work(rank: int, context: distca.Context) -> None:
        model = seeded(lambda: made.model("distca"))
        halves = []
        for seed, plan in enumerate(plans):
            layout, generator = plan.layout, torch.Generator().manual_seed(10 * seed + rank)
            halves.append(
                {
                    "input_ids": torch.randint(2, VOCABULARY, (1, layout.num_rows(rank)), generator=generator),
                    "position_ids": layout.position_ids(rank)[None],
                    "plan": plan.for_rank(rank),
                    "distca_context": context,
                    "use_cache": False,
                }
            )
        assert_same(results(ping_pong, model, halves), results(one_after_the_other, model, halves))

    with loopback_group(plans) as contexts:
        on_all_ranks(contexts, work)
        assert [context.step for context in contexts] == [16] * ranks


def test_gradients_of_tied_weights_differ_by_rounding_alone() -> None:
    plan = distca.plan(distca.Layout.from_documents([[40, 24]]), GQA)
    made = FAMILIES["llama"].model("distca")
    made.config.tie_word_embeddings = True
    model = type(made)(made.config).train()
    with loopback_group(plan) as [context]:
        shared = {"plan": plan, "distca_context": context, "use_cache": False}
        shared["position_ids"] = plan.layout.position_ids(0)[None]
        halves = [{"input_ids": torch.randint(2, VOCABULARY, (1, 64)), **shared} for _ in range(2)]
        found, expected = (results(run, model, halves) for run in (ping_pong, one_after_the_other))
    tied = "model.embed_tokens.weight"
    torch.testing.assert_close(found.pop(tied), expected.pop(tied), rtol=1e-5, atol=1e-5)
    assert_same(found, expected)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "recompute",
    [{}, {"context_fn": distca.save_core_attention}, {"use_reentrant": True}],
    ids=["recomputed", "attention is saved", "reentrant"],
)
def test_one_half_is_checkpointed_and_the_other_in_autocast(recompute: dict[str, Any], swapped: bool) -> None:
    plans = plans_for(2, (BF16, HEADS) if swapped else (HEADS, BF16))

    def work(rank: int, context: distca.Context) -> None:
        model, halves = seeded(Model), halves_for(plans, context)
        checkpointed, in_autocast = reversed(halves) if swapped else halves
        checkpointed["recompute"], in_autocast["cast"] = recompute, True
        checkpointed["x"].requires_grad_()  # reentrant checkpointing computes no gradients without this
        assert_same(results(ping_pong, model, halves), results(one_after_the_other, model, halves))

    with loopback_group(plans) as contexts:
        on_all_ranks(contexts, work)


@pytest.mark.parametrize("where", ["in both halves", "around"])
def test_autocast_shares_cast_weights_as_it_does_without_ping_pong(where: str) -> None:
    # On one rank, because rank threads share the cache of casts.
    plans, model = plans_for(1, (BF16, BF16)), seeded(Model)

    def around(run: Callable[..., list[Any]]) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16) if where == "around" else contextlib.nullcontext():
            return results(run, model, halves)

    with loopback_group(plans) as [context]:
        halves = halves_for(plans, context, cast=True)
        assert_same(around(ping_pong), around(one_after_the_other))


def test_both_halves_are_checkpointed_with_dropout_and_draw_the_same_numbers_again() -> None:
    plans = plans_for(1)
    model = seeded(Model)
    for layer in model.layers:
        layer.dropout.p = 0.5

    def run(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        return results(ping_pong, model, halves_for(plans, contexts[0], **options))

    with loopback_group(plans) as contexts:
        plain, checkpointed = run(), run(recompute={})
        after = torch.rand(3)
        assert_same(checkpointed, plain)
        torch.manual_seed(7)
        alone = model(**halves_for(plans, contexts[0])[0])
    assert torch.equal(plain["first"], alone), "the first half draws other numbers than without ping-pong"
    torch.randint(2**62, ())  # by this number the next call's second half gets another seed
    assert torch.equal(after, torch.rand(3)), "the generator goes on elsewhere than after one number more"


def test_the_second_half_draws_other_numbers_in_every_call_where_the_first_draws_none() -> None:
    """On each of two ranks with one document, one half is empty, and its dropout draws nothing."""
    layout = distca.Layout.from_documents([[60]])
    parts = distca.halves(layout)
    plans = [distca.plan(half.layout, HEADS) for half in parts]
    if plans[0].num_rows:
        plans.reverse()
    assert plans[0].num_rows == 0 and plans[1].num_rows == 60
    masks: list[torch.Tensor] = []

    class Drops(torch.nn.Module):
        def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
            dropped = torch.nn.functional.dropout(x, 0.5)
            masks.extend([dropped.detach() != 0] if len(x) else [])
            q, k, v = (dropped[:, None, None].repeat(1, n, HEADS.dim) for n in (HEADS.q, HEADS.kv, HEADS.kv))
            return distca.core_attention(q, k, v, plan, context=context)[0]

    both = distca.PingPong(Drops())
    with loopback_group(plans) as [context]:
        for _ in range(3):
            both(*({"x": torch.ones(plan.num_rows), "plan": plan, "context": context} for plan in plans))
    assert len(masks) == 3 and not any(torch.equal(masks[i], masks[i - 1]) for i in range(3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_the_same(mode: Callable[[], Any]) -> None:
    plans = plans_for(2)

    def work(rank: int, context: distca.Context) -> None:
        model, halves = seeded(Model), halves_for(plans, context)
        with mode():
            found, expected = ping_pong(model, halves), one_after_the_other(model, halves)
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found, expected, strict=True))

    with loopback_group(plans) as contexts:
        on_all_ranks(contexts, work)


def test_a_half_without_rows_on_a_rank_or_on_all_is_right() -> None:
    layouts = [distca.Layout([[(0, 0, 50)], []]), distca.Layout([[], []])]
    plans = [distca.plan(layout, HEADS) for layout in layouts]

    def work(rank: int, context: distca.Context) -> None:
        model, halves = seeded(Model), halves_for(plans, context)
        assert_same(results(ping_pong, model, halves), results(one_after_the_other, model, halves))

    with loopback_group(plans) as contexts:
        on_all_ranks(contexts, work)


def test_halves_of_different_length_and_a_model_that_looks_at_its_thread_state() -> None:
    """One half has twice the layers. Each half leaves the modes that it has entered, in its own order."""
    plans = plans_for(1)

    class Deeper(Model):
        def forward(self, x: torch.Tensor, plan: distca.Plan, context: Any, repeat: int) -> torch.Tensor:  # type: ignore[override]
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (repeat, t), self.unpacked(repeat))
            with torch.device("cpu"), hooks, torch.set_grad_enabled(True):
                for _ in range(repeat):
                    x = super().forward(x, plan, context)
                    assert len(torch.overrides._get_current_function_mode_stack()) == 1
            assert len(torch.overrides._get_current_function_mode_stack()) == 0
            return x

        @staticmethod
        def unpacked(repeat: int) -> Callable[[tuple[int, torch.Tensor]], torch.Tensor]:
            def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
                assert packed[0] == repeat, "a tensor was saved by the hooks of the other half"
                return packed[1]

            return unpack

    model = seeded(Deeper)
    with loopback_group(plans) as [context]:
        halves = halves_for(plans, context)
        halves[0]["repeat"], halves[1]["repeat"] = 1, 2
        assert_same(results(ping_pong, model, halves), results(one_after_the_other, model, halves))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Slow(torch.nn.Module):
    """A model that is slow on rank 1, where it computes far more than it needs."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **half: Any) -> torch.Tensor:
        for layer in self.inner.layers if half["context"].rank == 1 else []:
            for _ in range(20):
                layer.out(layer.qkv(half["x"])[:, :WIDTH])
        return self.inner(**half)


def test_a_slow_peer_changes_no_result_in_50_steps() -> None:
    plans = plans_for(2)

    def train(run: Callable[..., list[Any]], slow: bool) -> list[list[torch.Tensor]]:
        def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
            model = seeded(Model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            halves = halves_for(plans, context)
            for _ in range(50):
                results(run, Slow(model) if slow else model, halves)
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        with loopback_group(plans) as contexts:
            return on_all_ranks(contexts, work)

    found, expected = train(ping_pong, True), train(one_after_the_other, False)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
