"""The sweep: traffic from little to more than attention, 2 and 4 ranks, two mixes of documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.bench.overlap import computed, slept
from distca.apps.bench.overlap.benchmark import TRAFFIC, setting_of, wanted
from distca.apps.bench.overlap.cases import Measured
from distca.apps.bench.overlap.figures import Figures, figures_of, lines_of
from distca.apps.bench.overlap.picture import draw
from distca.apps.common.machine import setting

#: Seconds on the link for each second of attention, forward and backward together.
TRAFFICS = (0.3, 0.5, 0.7, 0.9, 1.2)
NAME = "overlap-sweep"
COMPUTE, SLEEP = "compute", "sleep"


class Ranks(NamedTuple):
    """Ranks with documents: whether they compute or sleep, their layers, and each one's documents in each half."""

    how: str
    mix: str
    layers: int
    documents: Sequence[Sequence[int]]

    @property
    def name(self) -> str:
        """Words for tables."""
        return f"{len(self.documents)} ranks that {self.how}, {self.mix}"


class Case(NamedTuple):
    """A speed of the link, and what was measured with it in so many rounds."""

    ranks: Ranks
    traffic: float
    rounds: int
    figures: dict[str, Figures]


GROUPS = (
    Ranks(COMPUTE, "one long document", 3, [[2048], [512] * 4]),
    Ranks(COMPUTE, "mixed documents", 3, [[1536, 320, 192], [768, 512, 384, 256, 128]]),
    Ranks(SLEEP, "one long document", 4, [[16384], [4096] * 4, [2048] * 8, [1024] * 16]),
    Ranks(
        SLEEP,
        "mixed documents",
        4,
        [[12288, 2560, 1536], [8192, 6144, 2048], [6144, 4096, 3072, 2048, 1024], [4096, 4096, 3072, 2560, 2048, 512]],
    ),
)


@dataclass
class SweepResult(Result):
    """All cases, with tables of their own."""

    cases: Sequence[Case] = field(default_factory=list)

    def table(self) -> str:
        """The cases as text."""
        lines = [f"distca bench overlap --sweep: intervals of at least {self.details['level_of_intervals']:.1%}"]
        for case in self.cases:
            name = f"{case.ranks.name}, traffic {case.traffic:g}, {case.rounds} rounds"
            lines += ["", name, *lines_of(case.figures)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The cases as a table in Markdown."""
        lines = [
            "| ranks, documents | traffic | rounds | forward: traffic, hidden | bound "
            "| backward: traffic, hidden | bound | step: hidden | bound | wanted "
            "| waits for rows | waits for a peer, link / one byte |",
            "|" + "---|" * 12,
        ]
        for case in self.cases:
            forward, backward, step = (case.figures[name] for name in ("forward", "backward", "step"))
            least = wanted(case.traffic)
            cells = [case.ranks.name, f"{case.traffic:g}", f"{case.rounds}"]
            for of in (forward, backward):
                cells += [f"{of.ratio:.2f}, {of.hidden}", f"{of.bound:.3f}"]
            cells += [f"{step.hidden}", f"{step.bound:.3f}"]
            cells.append("" if least is None else f"{least:g}")
            peers = (step.waits[kind].peer for kind in ("link", "one_byte"))
            cells += [f"{step.waits['link'].rows:.1%}", " / ".join(f"{share:.1%}" for share in peers)]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def write_all(self, folder: Path) -> list[Path]:
        """Writes JSON, table and picture to a folder, and returns their paths."""
        content, page, picture = (folder / f"{NAME}{ending}" for ending in (".json", ".md", ".png"))
        self.write(content)
        facts = setting()
        page.write_text(
            f"# What ping-pong hides: {facts['cpu']}, {facts['cores']} cores\n\n"
            f"`{facts['command']}`. An interval holds the median with a probability of at least\n"
            f"{self.details['level_of_intervals']:.1%}. Waits are shares of a step. A line's traffic is that of the\n"
            "whole step, about. `docs/pingpong.md` says what the columns are.\n\n"
            f"{self.markdown()}\n"
        )
        draw(self.cases, picture)
        return [content, page, picture]


def sweep(rounds: int | None = None, short: bool = False, groups: Sequence[Ranks] = GROUPS) -> SweepResult:
    """Measures every group of ranks at every speed of the link.

    Args:
        rounds: how often each kind of step is taken in a case; 9 by default, 3 if it is to be short. Cases with
            little traffic take more (`rounds_at`).
        short: fewer rounds and speeds.
        groups: the ranks.
    """
    rounds = rounds or (3 if short else 9)
    traffics = TRAFFICS[::2] if short else TRAFFICS
    cases = [case for group in groups for case in _cases(group, traffics, rounds)]
    level = min(of.hidden.level for case in cases for of in case.figures.values())
    return SweepResult(
        NAME,
        [_row(case) for case in cases],
        {
            "ranks_that_compute": setting_of(computed.plan_of(GROUPS[0].documents), GROUPS[0].layers, rounds, level),
            "ranks_that_sleep": setting_of(slept.plan_of(GROUPS[-1].documents), GROUPS[-1].layers, rounds, level),
            "rounds": rounds,
            "level_of_intervals": level,
            "cases": [
                {
                    "ranks": case.ranks._asdict(),
                    "traffic": case.traffic,
                    "rounds": case.rounds,
                    "figures": {name: of.as_json() for name, of in case.figures.items()},
                }
                for case in cases
            ],
        },
        cases,
    )


def rounds_at(traffic: float, rounds: int) -> int:
    """The rounds of a case; more where there is less traffic than `TRAFFIC`.

    What is hidden is a share of the traffic. With half of the traffic the same noise of a step is twice the error,
    which four times as many rounds make up for.
    """
    return math.ceil(rounds * max(1.0, TRAFFIC / traffic) ** 2)


def _row(case: Case) -> Row:
    name = f"{case.ranks.name}, traffic {case.traffic:g}: hidden"
    return Row(name, case.figures["step"].hidden.median, "", at_least=wanted(case.traffic))


def _cases(group: Ranks, traffics: Sequence[float], rounds: int) -> list[Case]:
    """Measures a group at some speeds of the link."""
    documents, layers = group.documents, group.layers
    cases = [(traffic, rounds_at(traffic, rounds)) for traffic in traffics]
    ranks: list[list[Measured]]
    if group.how == COMPUTE:
        plan = computed.plan_of(documents)
        ranks = distca.launch(computed.run_rank, documents, layers, cases, False, ranks=len(documents), threads=1)
    else:
        plan = slept.plan_of(documents)
        ranks = slept.run_ranks(documents, layers, cases)
    by_traffic = zip(*ranks, strict=True)
    return [
        Case(group, *case, figures_of(measured, [plan, plan])) for case, measured in zip(cases, by_traffic, strict=True)
    ]
