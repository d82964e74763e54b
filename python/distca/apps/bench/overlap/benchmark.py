"""One case: two ranks that compute, with one long document, at one speed of the link; and a single stream beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.bench.overlap import computed
from distca.apps.bench.overlap.cases import Measured
from distca.apps.bench.overlap.figures import Figures, figures_of, lines_of, paired_of, steps_of
from distca.apps.bench.overlap.paired import Paired, Step, estimate, seconds_of
from distca.trace.timeline import figures, windows

# Causal pairs are 3.4 : 0.6 on two ranks. Each half of the micro-batch has this layout.
DOCUMENTS = [[2048], [512] * 4]
LAYERS = 3
#: Seconds on the link for each second of attention.
TRAFFIC = 0.7
#: What is to be hidden, by seconds on the link for each second of attention of a step.
WANTED = {0.7: 0.9, 0.9: 0.8}


@dataclass
class OverlapResult(Result):
    """The rows, and the table of the phases below them."""

    phases: dict[str, Figures] = field(default_factory=dict)

    def table(self) -> str:
        """The rows as text, and forward and backward apart."""
        return "\n".join([super().table(), "", *lines_of(self.phases)])


def wanted(traffic: float) -> float | None:
    """The share that is to be hidden at such a traffic; None above the largest that has a target."""
    return next((share for most, share in WANTED.items() if traffic <= most), None)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of two halves on two single-threaded processes."""
    rounds = rounds or (7 if short else 15)
    ranks: list[list[Measured]] = distca.launch(
        computed.run_rank, DOCUMENTS, LAYERS, [(TRAFFIC, rounds)], True, ranks=len(DOCUMENTS), threads=1
    )
    case = [of_rank[0] for of_rank in ranks]
    plan = computed.plan_of(DOCUMENTS)
    found = figures_of(case, [plan, plan])
    paired, step = paired_of(case), found["step"]
    single, single_one_byte = steps_of(case, "single"), steps_of(case, "single_one_byte")
    of_single = Paired(single, single_one_byte, paired.without).hidden()
    faster = estimate([seconds_of(a) / seconds_of(b) for a, b in zip(single, paired.link, strict=True)])
    return OverlapResult(
        "overlap",
        [
            Row("time on the link / time of attention", step.ratio, "x"),
            Row("traffic hidden by ping-pong, median", step.hidden.median, "", at_least=wanted(TRAFFIC)),
            Row("its interval, from", step.hidden.low, ""),
            Row("its interval, to", step.hidden.high, ""),
            Row("what the order of calls allows", step.bound, ""),
            Row("traffic hidden in a single stream, median", of_single.median, ""),
            Row("single-stream step / ping-pong step", faster.median, "x"),
            Row("wait for rows on the link, share of a step", step.waits["link"].rows, ""),
            Row("wait for a later peer, share of a step", step.waits["link"].peer, ""),
            Row("the same with one byte a message", step.waits["one_byte"].peer, ""),
            Row("idle share of a step, slowest rank", _idle(paired.link), ""),
            Row("idle share in a single stream, slowest rank", _idle(single), ""),
        ],
        {
            **setting_of(plan, LAYERS, rounds, step.hidden.level),
            "lengths_of_each_half": DOCUMENTS,
            "phases": {name: of.as_json() for name, of in found.items()},
            "exposed_seconds_in_each_round": paired.exposed(),
            "single_stream_hidden": of_single._asdict(),
            "single_stream_over_ping_pong": faster._asdict(),
        },
        found,
    )


def setting_of(plan: distca.Plan, layers: int, rounds: int, level: float) -> dict[str, Any]:
    """What a case was measured with."""
    heads = plan.heads
    return {
        "heads": [heads.q, heads.kv, heads.dim],
        "dtype": str(heads.dtype).removeprefix("torch."),
        "layers": layers,
        "rounds": rounds,
        "level_of_intervals": level,
    }


def _idle(steps: Sequence[Step]) -> float:
    """The idle share of the rank that idles least, median of the steps."""
    return statistics.median(figures(step, windows(step)).idle_shares[0] for step in steps)
