"""`--compare`: steps in several ways on the same batches: with distca, in other ways of it, and without it."""

from __future__ import annotations

import contextlib
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
from distca.apps.common.memory_log import resident
from distca.apps.common.timing import alternate, median_ratio, spread
from distca.apps.pretrain.log import Step
from distca.apps.pretrain.options import Options
from distca.apps.pretrain.run import Run, write_options
from distca.apps.pretrain.ways import RESULT, WAYS
from distca.trace.trace import Span, Trace


def compare(options: Options, run_dir: Path, *, cuda: bool) -> dict[str, Any]:
    """Takes `options.compare` rounds, one before them that is not counted, and a traced one. It is collective.

    Each way has a model of its own, which begins with the same weights. A step's time is that of the slowest rank.
    Rank 0 writes `compare.json` and prints a line.
    """
    ways: dict[str, _Way] = {}
    with ExitStack() as stack:
        for name, way in WAYS.items():
            run = Run(replace(options, **way.options), run_dir, cuda=cuda, name=name)
            ways[name] = _Way(stack.enter_context(closing(run)), cuda)
        write_options(options, run_dir)
        times = dict(zip(WAYS, alternate(list(ways.values()), options.compare, timer=_seconds), strict=True))
        idle = {name: way.idle() for name, way in ways.items()}
    first = next(iter(WAYS))
    result: dict[str, Any] = {
        "ways": {
            name: {
                "seconds": times[name],
                "spread": spread(times[name]),
                "ratio": median_ratio(times[first], times[name]),
                "loss_difference": max(
                    abs(a.loss - b.loss) / b.loss for a, b in zip(ways[first].steps, way.steps, strict=True)
                ),
                **idle[name],
                "peak_memory": way.peak,
                **way.planned(),
            }
            for name, way in ways.items()
        },
        "tokens": ways[first].steps[0].tokens,
        "ranks": dist.get_world_size(),
        "options": options.as_json(),
        "setting": setting() | {"command": "pretrain_llama.py", "megatron": megatron.core.__version__},
    }
    if dist.get_rank() == 0:
        with writing(run_dir):
            (run_dir / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        of_ways = result["ways"]
        ratios = ", ".join(f"{way['ratio']:.3f} of {name}" for name, way in of_ways.items() if name != first)
        difference = max(way["loss_difference"] for way in of_ways.values())
        print(
            f"compare: time of a step with {first}: {ratios} (medians of {options.compare} rounds); imbalance "
            f"{of_ways[first]['imbalance_before']:.2f} -> {of_ways[first]['imbalance']:.2f}, losses equal to "
            f"{difference:.1e}"
        )
    return result


def _seconds(way: Any) -> float:
    return float(way())


class _Way:
    """Steps of one run, each between barriers.

    Attributes:
        steps: the figures of all steps.
        peak: the most bytes that any rank has had in a step: resident ones, on a GPU those of torch's allocator. The
            models of all ways are among them.
    """

    def __init__(self, run: Run, cuda: bool) -> None:
        self._run, self._cuda = run, cuda
        self.steps: list[Step] = []
        self.peak = 0

    def __call__(self) -> float:
        _reset_peak(self._cuda)
        dist.barrier()
        begin = time.perf_counter()
        step, _ = self._run.step(len(self.steps) + 1)
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() if self._cuda else resident()["rss_peak"]
        slowest = torch.tensor([seconds, peak], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.steps.append(step)
        self.peak = max(self.peak, int(slowest[1]))
        return float(slowest[0])

    def idle(self) -> dict[str, float | None]:
        """Takes a step, and returns shares of it, the means over ranks; None where they cannot be measured.

        ``uneven`` is what a rank would wait after each step of attention for the rank that attended longest. ``waits``
        is what it waited in steps of attention, for rows and for other ranks. They are not measured without distca, and
        on a GPU, where the host does not know of waits.
        """
        context = self._run.context
        if context is None or self._cuda:
            return {"uneven": None, "waits": None}
        context.start_trace()
        first = context.step
        seconds = self()
        trace = context.take_trace()
        context.stop_trace()
        self.steps.pop()
        spans: dict[int, list[Span]] = {number: [] for number in range(first + 1, context.step + 1)}
        for span in trace.spans:
            spans[span.step].append(span)
        attended = torch.tensor([Trace(0, of_step, []).attending for of_step in spans.values()], dtype=torch.float64)
        longest = attended.clone()
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        mine = torch.stack([(longest - attended).sum(), torch.tensor(trace.exposed, dtype=torch.float64)])
        dist.all_reduce(mine)
        uneven, waits = (mine / dist.get_world_size() / seconds).tolist()
        return {"uneven": uneven, "waits": waits}

    def planned(self) -> dict[str, float | None]:
        """Means over the steps of what the plans say; None without plans."""
        figures = {"imbalance_before": "imbalance_before", "imbalance": "imbalance_after", "bytes": "bytes"}
        of_steps = {name: [getattr(step, field) for step in self.steps[1:]] for name, field in figures.items()}
        return {name: None if None in values else statistics.mean(values) for name, values in of_steps.items()}


def _reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # the peak is then that of the whole run
            Path("/proc/self/clear_refs").write_text("5")
