"""`distca bench when-it-pays`: every strategy at its best set-up, for documents, models, clusters, links and kernels.

Everything is modelled. docs/when-it-pays.md has the tables and says what they mean.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from distca.apps.bench.harness import Result, Row
from distca.apps.bench.published import TENSOR, published_lengths
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.errors import InvalidArgumentError
from distca.simulator.reading import read_cluster, read_model
from distca.simulator.search import Found, search
from distca.simulator.setup import Cluster, Parallelism
from distca.simulator.strategies import STRATEGIES
from distca.simulator.strategies.distca_paper import fa2_table
from distca.simulator.validation import errors
from distca.simulator.verdict import Best, verdict_on

K = 1024
#: Tokens a GPU in a step, by model: about those of the published batches of 3D parallelism.
TOKENS = {"llama-8b": 16 * K, "llama-34b": 8 * K}
#: Up to so many GPUs tensor parallelism is searched as well; above them it is that of the paper.
FREE_TENSOR = 64
#: GPUs and tokens of a sequence. With 128K it is weak scaling: a GPU has the same tokens on any number of them.
GRID = (
    *((64, window * K) for window in (128, 256, 512)),
    *((gpus, window * K) for window in (128, 512) for gpus in (128, 256, 512)),
)
#: Steps of the comparison with WLB's delay of outliers.
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        part: the table that it is in.
        name: its line there.
        model: ``llama-8b`` or ``llama-34b``.
        gpus: ranks of ``h200-ib400``.
        window: tokens of a sequence.
        documents: where lengths are from: "scaled", "as published", "equal" or "one long".
        link: bandwidth between nodes, over that of the preset.
        attention: "h200" (cuDNN's published rates) or "fa2" (FlashAttention-2's).
        steps: steps of which the mean counts.
    """

    part: str
    name: str
    model: str = "llama-8b"
    gpus: int = 64
    window: int = 128 * K
    documents: str = "scaled"
    link: float = 1.0
    attention: str = "h200"
    steps: int = 1

    @property
    def cluster(self) -> Cluster:
        """The cluster, with these links and this attention."""
        made = read_cluster("h200-ib400", self.gpus)
        between = dataclasses.replace(made.between, bandwidth=made.between.bandwidth * self.link)
        if between.node_bandwidth is not None:
            between = dataclasses.replace(between, node_bandwidth=between.node_bandwidth * self.link)
        attention = fa2_table() if self.attention == "fa2" else self.attention
        return dataclasses.replace(made, between=between, device=dataclasses.replace(made.device, attention=attention))

    @property
    def fixed(self) -> dict[str, int | bool]:
        """What all set-ups have: no FSDP, and on many GPUs tensor parallelism as published."""
        return {"fsdp": False} | ({"tensor": TENSOR} if self.gpus > FREE_TENSOR else {})

    @property
    def strategies(self) -> list[str]:
        """The strategies; without those whose modelling takes too long."""
        slow = {"hybrid-context": 64, "distca-retained": 64}
        return [name for name in STRATEGIES if self.gpus <= slow.get(name, self.gpus)]

    def sequences(self, seed: int) -> list[list[int]]:
        """The sequences of a step."""
        count = max(1, self.gpus * TOKENS[self.model] // self.window)
        if self.documents == "equal":
            return [[self.window // 4] * 4 for _ in range(count)]
        if self.documents == "one long":
            short = [[2 * K] * (self.window // (2 * K)) for _ in range(count - 1)]
            return [[self.window], *short]
        if self.documents == "as published":
            return draw_documents(read_lengths(pretrain_lengths()), count, self.window, seed)
        return draw_documents(published_lengths(self.window), count, self.window, seed)


def cells(short: bool) -> Iterator[Cell]:
    """All comparisons; of `short` those of documents alone."""
    for documents in ("equal", "as published", "scaled", "one long"):
        yield Cell("documents", documents, documents=documents)
    if short:
        return
    for gpus, window in GRID:
        for model in TOKENS:
            yield Cell("grid", f"{model}, {window // K}K, {gpus} GPUs", model, gpus, window)
    yield Cell("kernels", "FlashAttention-2", window=512 * K, attention="fa2")
    for link in (0.25, 4.0):
        yield Cell("links", f"{link:g} x 47 GB/s between nodes", window=512 * K, link=link)
    yield Cell("delay", f"means of {STEPS} steps", steps=STEPS)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """All comparisons, of `rounds` draws of documents each (1 by default)."""
    return result_of([compared(cell, rounds or 1) for cell in cells(short)])


def run_only(
    name: str, rounds: int | None, content: dict[str, Any] | None, strategies: Sequence[str] | None = None
) -> Result:
    """One comparison, and those of earlier results besides.

    Args:
        name: of the comparison, ``part: name``.
        rounds: draws of documents; 1 by default. With `strategies` they are those of the earlier comparison.
        content: the earlier results; None: none.
        strategies: search these alone, and take all others from the earlier comparison; None: search all.

    Raises:
        InvalidArgumentError: there is no such comparison, it has no such strategy, or there is no earlier one to take
            the others from.
    """
    known = {f"{cell.part}: {cell.name}": cell for cell in cells(short=False)}
    if name not in known:
        raise InvalidArgumentError(f"--only {name!r}: the comparisons are {'; '.join(known)}")
    made = {f"{cell['part']}: {cell['name']}": cell for cell in (content["details"]["cells"] if content else [])}
    if strategies is None:
        made[name] = compared(known[name], rounds or 1)
    else:
        _check(strategies, known[name])
        if name not in made:
            raise InvalidArgumentError(
                f"--strategies: the file of --json has no comparison {name!r} whose other strategies could stay: make "
                "it without --strategies first"
            )
        made[name] = searched_again(known[name], made[name], strategies)
    return result_of([made[one] for one in known if one in made])


def _check(strategies: Sequence[str], cell: Cell) -> None:
    unknown = [name for name in strategies if name not in cell.strategies]
    if unknown:
        raise InvalidArgumentError(
            f"--strategies {unknown[0]!r}: the strategies of {cell.part}: {cell.name} are {', '.join(cell.strategies)}"
        )


def result_of(compared_cells: Sequence[dict[str, Any]]) -> Result:
    """The rows of comparisons that were made: the speed-up of distca's best strategy over the best other one."""
    rows = []
    for cell in compared_cells:
        verdicts = [draw["verdict"] for draw in cell["draws"] if draw["verdict"] is not None]
        if verdicts:
            name = f"{cell['part']}: {cell['name']}: {verdicts[0]['ours']} over {verdicts[0]['other']} (modelled)"
            rows.append(Row(name, statistics.mean(verdict["speedup"] for verdict in verdicts), ""))
    details = {"kind": "modelled", "errors": dataclasses.asdict(errors()), "cells": list(compared_cells)}
    return Result("when-it-pays", rows, details)


def compared(cell: Cell, draws: int) -> dict[str, Any]:
    """A comparison as JSON, with the best set-up of every strategy."""
    made = [_draw(cell, seed, _searched(cell, seed, cell.strategies)) for seed in range(draws)]
    return {**dataclasses.asdict(cell), "draws": made}


def searched_again(cell: Cell, earlier: dict[str, Any], strategies: Sequence[str]) -> dict[str, Any]:
    """An earlier comparison as JSON, in which some of the strategies are searched anew and the others stay."""
    draws = []
    for seed, draw in enumerate(earlier["draws"]):
        found = {one["strategy"]: one for one in (*draw["strategies"], *_searched(cell, seed, strategies))}
        in_order = dict.fromkeys(name for name in (*cell.strategies, *found) if name in found)
        draws.append(_draw(cell, seed, [found[name] for name in in_order]))
    return {**earlier, "draws": draws}


def _searched(cell: Cell, seed: int, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """The best set-ups of some strategies for one draw of documents, as JSON."""
    first, *following = _steps(cell, seed)
    found = search(
        first,
        cluster=cell.cluster,
        model=read_model(cell.model),
        strategies=strategies,
        fixed=cell.fixed,
        following=following,
    )
    return [_as_json(one) for one in found]


def _steps(cell: Cell, seed: int) -> list[list[list[int]]]:
    return [cell.sequences(seed * cell.steps + number) for number in range(cell.steps)]


def _as_json(found: Found) -> dict[str, Any]:
    made = found.as_json()
    if found.result is not None:
        made["result"]["idle"] = {"most": max(found.result.idle), "mean": statistics.mean(found.result.idle)}
    return made


def _draw(cell: Cell, seed: int, strategies: list[dict[str, Any]]) -> dict[str, Any]:
    """One draw of documents as JSON: the best set-ups of strategies, and the verdict on them."""
    best = [
        Best(
            one["strategy"],
            Parallelism(**one["parallelism"]),
            one["result"]["tokens_per_second"],
            one["result"]["attention"],
        )
        for one in strategies
        if one["result"] is not None
    ]
    verdict = verdict_on(best, _steps(cell, seed)[0], errors())
    return {"verdict": None if verdict is None else dataclasses.asdict(verdict), "strategies": strategies}
