"""`distca bench scaling`: how much attention idles in modelled steps of distca on 64 to 1,024 GPUs, and what bounds it.

The cluster is the preset h200-ib400, with a tensor parallel group on each node. Documents are drawn into chunks of the
context's length. They lie on the homes in two ways: one after the other, so that one that is longer than a home's rows
is on several; or as `distca.Layout.spread` lays them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from distca.apps.bench.harness import Result, Row
from distca.apps.bench.published import published_lengths
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.apps.simulate.sweep import scaled
from distca.planner.layout import Layout
from distca.simulator.case import Case
from distca.simulator.reading import read_cluster, read_model
from distca.simulator.setup import Cluster, Parallelism
from distca.simulator.simulate import StrategyResult, play
from distca.simulator.ticking import Ticking

TENSOR = 8
GPUS, SHORT_GPUS = (64, 128, 256, 512, 1024), (64, 512)
#: The most GPUs with a pipeline, and with as many draws as asked for. On more there is one draw.
MOST_DRAWN = 512
CONTEXTS, SHORT_CONTEXTS = (131072, 262144, 524288, 1048576), (131072, 524288)
#: Stages of the pipeline, and micro-batches of a step.
SHAPES = ((1, 1), (4, 8))
#: The list as published, multiplied so that its longest document is the context; and as the paper draws from it.
LISTS = ("list", "paper")
WAYS = ("ping-pong", "single")
#: Where documents lie: one after another (`Layout.packed`), or long ones on many homes (`Layout.spread`).
HOMES = ("packed", "spread")


@dataclasses.dataclass(frozen=True)
class Way:
    """A step in ping-pong or in a single stream. Shares are of the step.

    Attributes:
        seconds: its time.
        rows, uneven, links, fill: mean idle share of the homes by cause, as in `IdleShares`.
        port: seconds of the port that is busiest with rows in each tick, over the seconds that a home computes.
        longest: share of these seconds in which the port is one of a home with rows of the tick's longest document.
        latency: share of ``rows`` that would be gone if links had no latency.
    """

    seconds: float
    rows: float
    uneven: float
    links: float
    fill: float
    port: float
    longest: float
    latency: float

    @property
    def idle(self) -> float:
        """The idle share that attention is the cause of."""
        return self.rows + self.uneven

    @property
    def bound(self) -> str:
        """What bounds it: plans that are not quite even, latency, or a port."""
        if self.uneven >= self.rows:
            return "tolerance"
        if self.latency >= 0.5:
            return "latency"
        return "longest document's port" if self.longest >= 0.5 else "port"


@dataclasses.dataclass(frozen=True)
class Point:
    """A model on so many GPUs, with documents of a list and a context on homes, in both ways."""

    model: str
    lengths: str
    context: int
    gpus: int
    stages: int
    homes: str
    recompute: bool
    ways: dict[str, Way]

    @property
    def step(self) -> tuple[str, str, int, int, int]:
        """What the step is, wherever its documents lie."""
        return self.model, self.lengths, self.context, self.gpus, self.stages

    @property
    def better(self) -> str:
        """The faster way."""
        return min(self.ways, key=lambda name: self.ways[name].seconds)

    @property
    def row(self) -> Row:
        """The better way's idle share as a line of a table."""
        of = self.ways[self.better]
        where = f"{self.model}, {self.lengths}, {self.context // 1024}K, {self.gpus} GPUs, {self.stages} stages"
        return Row(
            f"{where}, {self.homes}, {self.better}, bound by {of.bound}: idle share of attention, modelled",
            100 * of.idle,
            "%",
        )


def run(rounds: int | None = None, short: bool = False) -> Result:
    """All points, means of `rounds` draws of documents. `short` has fewer GPUs and contexts, and no pipeline."""
    rounds = rounds or (1 if short else 3)
    contexts, gpus = (SHORT_CONTEXTS, SHORT_GPUS) if short else (CONTEXTS, GPUS)
    points = [
        point
        for stages, micro_batches in SHAPES[: 1 if short else None]
        for model in ("llama-8b", "llama-34b")
        for lengths in LISTS
        for context in contexts
        for ranks in (gpus if stages == 1 else [number for number in gpus if number <= MOST_DRAWN])
        for point in _points(
            model, lengths, context, ranks, stages, micro_batches, rounds if ranks <= MOST_DRAWN else 1
        )
    ]
    details = {
        "kind": "modelled",
        "draws": rounds,
        "micro_batches": {str(stages): number for stages, number in SHAPES},
        "points": [dataclasses.asdict(point) for point in points],
    }
    return Result("scaling", [point.row for point in points], details)


def tokens_of_home(model: str, context: int) -> int:
    """Tokens of a home in a micro-batch: the paper's batches over its nodes (table 3)."""
    return 65536 if model == "llama-34b" and context < 524288 else 131072


def _points(
    model: str, lengths: str, context: int, gpus: int, stages: int, micro_batches: int, draws: int
) -> Iterator[Point]:
    """A point for each kind of homes, or nothing if the homes of a stage are too few for a document of this length."""
    homes, tokens = gpus // TENSOR // stages, tokens_of_home(model, context)
    if homes * tokens < context:
        return
    drawn_from = published_lengths(context) if lengths == "paper" else _longest_is(context)
    drawn = [
        [
            sum(draw_documents(drawn_from, homes * tokens // context, context, draw * micro_batches + number), [])
            for number in range(micro_batches)
        ]
        for draw in range(draws)
    ]
    for kind in HOMES:
        shape = Parallelism(data=homes, tensor=TENSOR, pipeline=stages, micro_batches=micro_batches)
        found: dict[str, list[Way]] = {way: [] for way in WAYS}
        for micro_batch in drawn:
            layouts = [_laid(kind, of_layout, homes, tokens) for of_layout in micro_batch]
            nowhere: list[list[int]] = [[] for _ in range(homes - 1)]
            documents = [[layout.document_lengths, *nowhere] for layout in layouts]
            case = Case(documents, read_cluster("h200-ib400", gpus), read_model(model), shape)
            if Ticking(case, ping_pong=True, layouts=layouts).memory.total > case.cluster.device.memory:
                shape = dataclasses.replace(shape, recompute=True)
                case = dataclasses.replace(case, parallelism=shape)
            for way, of_draws in found.items():
                of_draws.append(_way(Ticking(case, ping_pong=way == "ping-pong", layouts=layouts)))
        means = {way: _mean(of_draws) for way, of_draws in found.items()}
        yield Point(model, lengths, context, gpus, stages, kind, shape.recompute, means)


def _laid(kind: str, lengths: list[int], homes: int, tokens: int) -> Layout:
    if kind == "packed":
        return Layout.packed(lengths, ranks=homes, tokens_per_rank=tokens)
    return Layout.spread(lengths, ranks=homes)


def _longest_is(context: int) -> list[int]:
    """The list with its longest document as long as the context; as it is where that is 128K, which it nearly is."""
    lengths = read_lengths(pretrain_lengths())
    return lengths if context == CONTEXTS[0] else scaled(lengths, context)


def _way(program: Ticking) -> Way:
    case = program.case
    result = play("distca", [program], [case])
    waiting = result.idle_by_cause.rows * result.seconds
    at_once = play("distca", [program], [dataclasses.replace(case, cluster=_without_latency(case.cluster))])
    causes = result.idle_by_cause
    port, longest = _busiest_ports(program)
    return Way(
        seconds=result.seconds,
        rows=causes.rows,
        uneven=causes.uneven,
        links=causes.links,
        fill=causes.fill,
        port=port / _computing(result),
        longest=longest,
        latency=1 - at_once.idle_by_cause.rows * at_once.seconds / waiting if waiting > 0 else 0.0,
    )


def _computing(result: StrategyResult) -> float:
    return result.seconds * (1 - statistics.mean(result.idle))


def _without_latency(cluster: Cluster) -> Cluster:
    inside, between = (dataclasses.replace(link, latency=0.0) for link in (cluster.inside, cluster.between))
    return dataclasses.replace(cluster, inside=inside, between=between)


def _busiest_ports(program: Ticking) -> tuple[float, float]:
    """Seconds of the port that is busiest with rows, of all ticks; and the longest documents' homes' share of them."""
    case, plans = program.case, program.plans
    of_all = of_longest = 0.0
    for number, tick in enumerate(plans.table):
        busy = torch.zeros(2, case.num_homes, dtype=torch.float64)
        for part in plans.parts:
            for work in program.work_of(number, part).attention.values():
                for traffic in (work.inward, work.homeward):
                    if traffic.between is not None:
                        busy += torch.stack([traffic.between.sum(1), traffic.between.sum(0)])
        layouts = {case.stages[s][0]: plans.layouts[one.microbatch] for s, one in enumerate(tick.work) if one}
        seconds = float(busy.max()) / case.cluster.between.bandwidth * plans.depth
        of_all += seconds
        if int(busy.argmax()) % case.num_homes in _homes_of_longest(layouts):
            of_longest += seconds
    return of_all, of_longest / of_all if of_all else 0.0


def _homes_of_longest(layouts: dict[int, Layout]) -> set[int]:
    """Homes with rows of the longest document of some layouts, each of which begins at a home."""
    longest = max(layout.longest_document for layout in layouts.values())
    homes = set()
    for first, layout in layouts.items():
        lengths = layout.document_lengths
        for rank in range(layout.num_ranks):
            if any(document >= 0 and lengths[document] == longest for document, _, _ in layout.segments(rank)):
                homes.add(first + rank)
    return homes


def _mean(ways: list[Way]) -> Way:
    names = [field.name for field in dataclasses.fields(Way)]
    return Way(**{name: statistics.mean(getattr(way, name) for way in ways) for name in names})


def points_of(details: dict[str, Any]) -> list[Point]:
    """The points of a file of results."""
    return [
        Point(**{**point, "ways": {name: Way(**way) for name, way in point["ways"].items()}})
        for point in details["points"]
    ]
