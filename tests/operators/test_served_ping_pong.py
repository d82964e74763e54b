"""A rank without rows serves a model in ping-pong, whatever activation checkpointing runs again in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from distca.calls import calls_of_pass, groups_of
from support.groups import loopback_group, on_all_ranks
from support.halves import (
    HEADS,
    LENGTHS,
    Model,
    assert_same,
    halves_for,
    one_after_the_other,
    ping_pong,
    results,
    seeded,
)

LAYERS = 3

Recompute = str | tuple[int, ...] | None


class Grouped(Model):
    """Runs layers again in groups of these sizes, and keeps what the options say."""

    def __init__(self, sizes: tuple[int, ...], **options: Any) -> None:
        super().__init__(layers=LAYERS)
        self.sizes, self.options = sizes, options

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: Any) -> torch.Tensor:  # type: ignore[override]
        def run(x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
            for layer in self.layers[begin:end]:
                x = layer(x, plan, context)
            return x

        begin = 0
        for size in self.sizes:
            x = checkpoint(run, x, begin, begin + size, use_reentrant=False, **self.options)
            begin += size
        return run(x, begin, LAYERS)


SIZES: dict[Recompute, tuple[int, ...]] = {
    None: (),
    "layer": (1,) * LAYERS,
    "stage": (LAYERS,),
    (2, 1): (2, 1),
    (2, 0): (2,),
}


def _plans() -> list[distca.Plan]:
    """Plans of two halves in which rank 2 has no rows and computes for the others."""
    layouts = [distca.Layout.packed(lengths, ranks=2, tokens_per_rank=130) for lengths in LENGTHS]
    with_server = [distca.Layout([layout.segments(0), layout.segments(1), []]) for layout in layouts]
    plans = [distca.plan(layout, HEADS, servers=[1, 2]) for layout in with_server]
    assert all(any(task.server == 2 for task in plan.tasks) for plan in plans)
    return plans


@pytest.mark.parametrize("save_attention", [False, True], ids=["", "attention is saved"])
@pytest.mark.parametrize("recompute", SIZES, ids=str)
def test_a_dedicated_server_serves_all_layers_and_those_that_are_run_again(
    recompute: Recompute, save_attention: bool
) -> None:
    plans = _plans()
    found: dict[int, dict[str, torch.Tensor]] = {}
    expected: dict[int, dict[str, torch.Tensor]] = {}
    options = {"context_fn": distca.save_core_attention} if save_attention else {}

    def work(rank: int, context: distca.Context) -> None:
        if rank < 2:
            model, halves = seeded(lambda: Grouped(SIZES[recompute], **options)), halves_for(plans, context)
            results(ping_pong, model, halves)
            found[rank] = results(ping_pong, model, halves)
            return
        both = (plans[0].for_rank(2), plans[1].for_rank(2))
        for phase in ["forward", "backward"] * 2:
            again = None if save_attention else recompute
            distca.serve_ping_pong([both] * LAYERS, phase, recompute=again, context=context)

    def plain(rank: int, context: distca.Context) -> None:
        model, halves = seeded(lambda: Grouped(())), halves_for(plans, context)
        expected[rank] = results(one_after_the_other, model, halves)

    for run in (work, plain):
        with loopback_group(plans) as contexts:
            on_all_ranks(contexts, run)
    for rank, of_rank in found.items():
        assert_same(of_rank, expected[rank])


def _words(phase: str, num_layers: int, recompute: Recompute, **options: Any) -> str:
    """The calls in short: d, a, c for the parts, x for a whole step; layer; half as A or B; ' for backward."""
    groups = groups_of("test", recompute, num_layers)
    letters = {"core_attention": "x", "dispatch": "d", "attend": "a", "collect": "c"}
    return " ".join(
        f"{letters[part]}{layer}{'' if half is None else 'AB'[half]}" + ("'" if phase == "backward" else "")
        for part, phase, layer, half in calls_of_pass(phase, num_layers, groups=groups, **options)
    )


@pytest.mark.parametrize(
    ("phase", "recompute", "expected"),
    [
        ("forward", "layer", "x0 x1 x2"),
        ("backward", None, "x2' x1' x0'"),
        ("backward", "layer", "x2 x2' x1 x1' x0 x0'"),
        ("backward", "stage", "x0 x1 x2 x2' x1' x0'"),
        ("backward", [1, 2], "x1 x2 x2' x1' x0 x0'"),
        ("backward", [0, 1, 0], "x2' x1 x1' x0'"),
    ],
)
def test_the_calls_of_whole_steps(phase: str, recompute: Recompute, expected: str) -> None:
    assert _words(phase, 3, recompute) == expected


@pytest.mark.parametrize(
    ("phase", "recompute", "expected"),
    [
        ("forward", "layer", "d0A d0B a0A a0B c0A d1A c0B d1B a1A a1B c1A c1B"),
        ("backward", None, "d1B' d1A' a1B' a1A' c1B' d0B' c1A' d0A' a0B' a0A' c0B' c0A'"),
        (
            "backward",
            "layer",
            "d1B a1B c1B d1B' d1A a1A c1A d1A' a1B' a1A' "
            "c1B' d0B a0B c0B d0B' c1A' d0A a0A c0A d0A' a0B' a0A' c0B' c0A'",
        ),
        (
            "backward",
            "stage",
            "d0B a0B c0B d1B a1B c1B d1B' d0A a0A c0A d1A a1A c1A d1A' a1B' a1A' "
            "c1B' d0B' c1A' d0A' a0B' a0A' c0B' c0A'",
        ),
    ],
)
def test_the_calls_of_two_halves(phase: str, recompute: Recompute, expected: str) -> None:
    assert _words(phase, 2, recompute, halves=True) == expected


def test_no_layers_make_no_calls() -> None:
    assert calls_of_pass("forward", 0, halves=True) == calls_of_pass("backward", 0, halves=True) == []


@pytest.mark.parametrize("recompute", ["all", [1, 1], [3, 0], [1, 0], [2, -1], [True, 2], 3])
def test_recomputation_that_does_not_fit_the_layers_is_refused(recompute: Any) -> None:
    both = tuple(plan.for_rank(2) for plan in _plans())
    with pytest.raises(distca.InvalidArgumentError, match="serve_ping_pong: recompute"):
        distca.serve_ping_pong([both] * 3, "backward", recompute=recompute)  # type: ignore[list-item]
