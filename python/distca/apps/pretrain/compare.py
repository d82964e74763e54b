"""`--compare`: steps with distca, without balance, and with Megatron's schedule and attention, on the same batches."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist

from distca.apps.common.files import writing
from distca.apps.common.machine import setting
from distca.apps.common.timing import alternate, median_ratio, spread
from distca.apps.pretrain.log import Step
from distca.apps.pretrain.options import Options
from distca.apps.pretrain.run import Run
from distca.apps.pretrain.table import RESULT, WAYS


def compare(options: Options, run_dir: Path, *, cuda: bool) -> dict[str, Any]:
    """Takes `options.compare` rounds, and one before them that is not counted. It is collective.

    Each way has a model of its own, which begins with the same weights. A step's time is that of the slowest rank.
    Rank 0 writes `compare.json` and prints a line.
    """
    with ExitStack() as stack:
        runs = [stack.enter_context(closing(Run(replace(options, **how), run_dir, cuda=cuda))) for how in WAYS.values()]
        ways = [_Way(run) for run in runs]
        times = dict(zip(WAYS, alternate(ways, options.compare, timer=_seconds), strict=True))
        steps = dict(zip(WAYS, (way.steps for way in ways), strict=True))
    ours, others = steps["distca"], [name for name in WAYS if name != "distca"]
    result: dict[str, Any] = {
        "ratio": {name: median_ratio(times["distca"], times[name]) for name in others},
        "spread": {name: spread(of_way) for name, of_way in times.items()},
        "seconds": times,
        "tokens": ours[0].tokens,
        "loss_difference": {
            name: max(abs(a.loss - b.loss) / b.loss for a, b in zip(ours, steps[name], strict=True)) for name in others
        },
        "imbalance_before": statistics.mean(step.imbalance_before or 1.0 for step in ours[1:]),
        "imbalance_after": statistics.mean(step.imbalance_after or 1.0 for step in ours[1:]),
        "bytes": statistics.mean(step.bytes or 0 for step in ours[1:]),
        "peak_memory": {name: way.peak for name, way in zip(WAYS, ways, strict=True)},
        "ranks": dist.get_world_size(),
        "options": options.as_json(),
        "setting": setting() | {"command": "pretrain_llama.py", "megatron": megatron.core.__version__},
    }
    if dist.get_rank() == 0:
        with writing(run_dir):
            (run_dir / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        ratio, difference = result["ratio"], max(result["loss_difference"].values())
        print(
            f"compare: a step takes {ratio['unbalanced']:.3f} of its time without balance, and {ratio['megatron']:.3f} "
            f"of that with Megatron's schedule and attention (medians of {options.compare} rounds); imbalance "
            f"{result['imbalance_before']:.2f} -> {result['imbalance_after']:.2f}, losses equal to {difference:.1e}"
        )
    return result


def _seconds(way: Any) -> float:
    return float(way())


class _Way:
    """Steps of one run, each between barriers.

    Attributes:
        steps: the figures of all steps.
        peak: the most bytes of a GPU that a step has had on any rank; None on CPU ranks.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.steps: list[Step] = []
        self.peak: int | None = None

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        step, _ = self._run.step(len(self.steps) + 1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated())
        slowest = torch.tensor([time.perf_counter() - begin, self.peak or 0], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.steps.append(step)
        self.peak = int(slowest[1]) or None
        return float(slowest[0])
