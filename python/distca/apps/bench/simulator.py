"""`distca bench simulator`: steps as the simulator models them, against the same steps of `distca train`.

The machine is measured first, as `distca profile --cluster` does. No step that is compared is used for that. Times are
ratios to one reference step, which is taken anew beside every two others (`real_steps`). Medians over the rounds count.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from itertools import chain
from typing import Any, NamedTuple

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.bench.real_steps import RANKS, VOCABULARY, Step, Timed, in_order, relative, run_rank
from distca.apps.bench.replayed import replayed
from distca.apps.common.timing import median_ratio, spread
from distca.apps.profile.cluster import measure_cluster, tiny_llama
from distca.simulator.machine import Event
from distca.simulator.reading import as_cluster
from distca.simulator.setup import Cluster, Parallelism
from distca.simulator.simulate import StrategyResult, simulate

HEADS = distca.Heads(q=8, kv=2, dim=64)
#: Hidden sizes whose products are measured.
HIDDEN = (128, 256, 512)
ONE_LONG, MIXED, VERY_LONG = ((3072,), (768,) * 4), ((2048, 512, 512), (1024,) * 3), ((6144,), (512,) * 12)
SMALL: dict[str, Any] = {"hidden": 128, "heads": 2, "kv_heads": 1}
LINKED: dict[str, Any] = {**SMALL, "documents": (((4096,), (512,) * 8),)}
STAGES = (((2048,),), ((512,) * 4,), ((1024, 1024),), ((1536, 512),))
#: The reference comes first. No balance directly follows the step that it is compared with (`in_order`).
STEPS = [
    Step("one long document", (ONE_LONG,)),
    Step("one long document, no balance", (ONE_LONG,), how="off"),
    Step("one long document, ping-pong", (ONE_LONG,), how="ping-pong"),
    Step("mixed documents", (MIXED,)),
    Step("mixed documents, no balance", (MIXED,), how="off"),
    Step("a very long document, hidden 128", (VERY_LONG,), **SMALL),
    Step("a very long document, hidden 128, no balance", (VERY_LONG,), how="off", **SMALL),
    Step("a very long document, hidden 128, ping-pong", (VERY_LONG,), how="ping-pong", **SMALL),
    Step("equal documents", (((1536,) * 2, (1536,) * 2),)),
    Step("hidden 512, short documents", (((1024, 512), (256,) * 6),), hidden=512, heads=8),
    Step("hidden 384, not profiled", (((2048,), (512,) * 4),), hidden=384, heads=6, kv_heads=3),
    Step("4 layers, hidden 128", (((4096,), (256,) * 16),), layers=4, **SMALL),
    Step("two micro-batches", (((1536,), (512,) * 3), ((512,) * 3, (1536,)))),
    Step("unequal tokens", (((4096,), (512, 512)),), **SMALL),
    Step("link of 200 MB/s", link=(2e8, 1e-4), **LINKED),
    Step("link of 200 MB/s, ping-pong", how="ping-pong", link=(2e8, 1e-4), **LINKED),
    Step("link of 80 MB/s", link=(8e7, 1e-4), **LINKED),
    Step("recomputation", (ONE_LONG,), recompute=True),
    Step("recomputation, no balance", (ONE_LONG,), how="off", recompute=True),
    Step("recomputation, ping-pong", (ONE_LONG,), how="ping-pong", recompute=True),
    Step("sharded weights", (ONE_LONG,), fsdp=True),
    Step("sharded weights, recomputation, 4 layers", (ONE_LONG,), layers=4, recompute=True, fsdp=True, **SMALL),
    Step("two stages", STAGES, pipeline=2),
    Step("two stages, ping-pong", STAGES, how="ping-pong", pipeline=2),
]
BALANCED_OF = {number: number - 1 for number, step in enumerate(STEPS) if step.how == "off"}
STRATEGY = {"off": "unbalanced", "single": "distca-single", "ping-pong": "distca"}


class Compared(NamedTuple):
    """A step's time over that of the reference, and how far the rounds' ratios are apart (quartiles over median)."""

    measured: float
    modelled: float
    spread: float

    @property
    def error(self) -> float:
        """How far the modelled ratio is from the measured one, relatively."""
        return self.modelled / self.measured - 1

    @property
    def allowed(self) -> float:
        """How far it may be."""
        return max(0.1, 2 * self.spread)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Two single-threaded processes take all steps in turns. Then 8 ranks replay measured attention."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds = rounds or (3 if short else 7)
    cluster = as_cluster(measure_cluster(HEADS, HIDDEN, RANKS, 3, VOCABULARY), "this machine")
    of_ranks: list[list[list[Timed]]] = distca.launch(run_rank, STEPS, rounds, ranks=RANKS, threads=1)
    order = in_order(len(STEPS))
    places = [list(zip(*of_place, strict=True)) for of_place in zip(*of_ranks, strict=True)]
    seconds = [[max(t.end for t in of) - min(t.begin for t in of) for of in of_place] for of_place in places]
    ratios = relative(seconds, order)
    real = [
        [of for place, at in enumerate(order) if at == number for of in places[place]] for number in range(len(STEPS))
    ]
    references = [seconds[place] for place, number in enumerate(order) if number == 0]
    models = [modelled(step, cluster) for step in STEPS]
    compared = [
        Compared(statistics.median(of_step), model.seconds / models[0].seconds, spread(of_step))
        for of_step, model in zip(ratios, models, strict=True)
    ]
    rows = [
        Row(f"{step.name}: {one.measured:.3f} measured, {one.modelled:.3f} modelled: error", 100 * one.error, "%")
        for step, one in zip(STEPS[1:], compared[1:], strict=True)
    ]
    gains = {
        STEPS[off].name: (
            # The reference is taken around the step, others directly before it or after it.
            1 / statistics.median(ratios[off])
            if on == 0
            else median_ratio(seconds[order.index(on)], seconds[order.index(off)]),
            models[on].seconds / models[off].seconds,
        )
        for off, on in BALANCED_OF.items()
    }
    replay = replayed(1)
    details = {
        "reference": STEPS[0].name,
        "reference_seconds": statistics.median(chain.from_iterable(references)),
        "reference_spread": spread(
            [taken / statistics.median(of) for of in zip(*references, strict=True) for taken in of]
        ),
        "reference_modelled_seconds": models[0].seconds,
        "rounds": rounds,
        "steps": [
            {**dataclasses.asdict(step), **one._asdict(), "error": one.error, **_by_part(of_step, model)}
            for step, one, of_step, model in zip(STEPS, compared, real, models, strict=True)
        ],
        "balanced_over_unbalanced": gains,
        "replay_of_8_ranks": replay,
    }
    return Result("simulator", rows + _summary(compared[1:], gains, replay), details)


def _summary(
    compared: list[Compared], gains: dict[str, tuple[float, float]], replay: dict[str, tuple[float, float]]
) -> list[Row]:
    errors = [abs(one.error) for one in compared]
    over_allowed = max(abs(one.error) / one.allowed for one in compared)
    of_gains = [abs(model / real - 1) for real, model in gains.values()]
    return [
        *(
            Row(f"replay of 8 ranks, {name}: {real:.3f} measured, {model:.3f} modelled: difference", model - real, "")
            for name, (real, model) in replay.items()
        ),
        Row("steps, median error", 100 * statistics.median(errors), "%", at_most=5),
        Row("steps, largest error", 100 * max(errors), "%"),
        Row(
            "steps, largest error over what is allowed (10 %, or twice the repeats' spread)",
            over_allowed,
            "",
            at_most=1,
        ),
        Row("balanced / not balanced, largest error", 100 * max(of_gains), "%", at_most=3),
    ]


def modelled(step: Step, cluster: Cluster) -> StrategyResult:
    """The step as the simulator has it on this cluster."""
    model = dataclasses.replace(
        tiny_llama(step.hidden, HEADS, VOCABULARY), layers=step.layers, q_heads=step.heads, kv_heads=step.kv_heads
    )
    if step.link is not None:
        bandwidth, latency = step.link
        inside = dataclasses.replace(cluster.inside, bandwidth=bandwidth, latency=latency)
        cluster = dataclasses.replace(cluster, inside=inside)
    shape = Parallelism(
        data=RANKS // step.pipeline,
        pipeline=step.pipeline,
        micro_batches=len(step.documents),
        fsdp=step.fsdp,
        recompute=step.recompute,
        save_attention=step.recompute,
        shard_optimizer=False,
    )
    (result,) = simulate(
        step.documents,
        cluster=cluster,
        model=model,
        parallelism=shape,
        strategies=[STRATEGY[step.how]],
        tolerance=step.config.tolerance,
        record=True,
    )
    return result


def _by_part(real: list[tuple[Timed, ...]], model: StrategyResult) -> dict[str, Any]:
    """Seconds of each rank's attention and waits, measured (medians) and modelled, to find what a miss is due to."""
    ranks = range(RANKS)
    return {
        "measured_seconds": statistics.median(max(t.end for t in of) - min(t.begin for t in of) for of in real),
        "modelled_seconds": model.seconds,
        "measured_attention": [statistics.median(of[rank].attending for of in real) for rank in ranks],
        "modelled_attention": [_seconds_of(model.events, "attention", rank) for rank in ranks],
        "measured_waits": [statistics.median(of[rank].waiting for of in real) for rank in ranks],
        "modelled_waits": [_seconds_of(model.events, "wait", rank) for rank in ranks],
    }


def _seconds_of(events: list[Event], what: str, rank: int) -> float:
    return sum(float(event.end[rank] - event.begin[rank]) for event in events if event.what == what)
