"""The command `distca bench`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from distca.apps.bench.harness import write_report
from distca.apps.common.options import add_debug
from distca.errors import InvalidArgumentError

BENCHMARKS = ("attention", "balance", "overhead", "overlap", "plan", "replay", "shards", "transport")
GPU_BENCHMARKS = {"attention": "gpu", "shards": "gpu", "transport": "gpu_transport"}  # the module of each


def add_command(commands: Any) -> None:
    """Adds `bench` to the parser of the command line."""
    command = commands.add_parser(
        "bench",
        help="measure, as ratios against a peer in the same run",
        description="Each benchmark times its peers in alternation in one run and prints ratios.",
    )
    command.add_argument("benchmark", choices=(*BENCHMARKS, "all"), help="what to measure")
    command.add_argument("--short", action="store_true", help="fewer cases and rounds")
    command.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: attention, shards and transport on a GPU (default: cpu)",
    )
    command.add_argument(
        "--rounds", type=int, default=None, help="rounds of the alternation (default: the benchmark's)"
    )
    command.add_argument("--json", type=Path, default=None, help="also write figures, hardware and versions here")
    command.add_argument("--results", type=Path, default=None, help="also write a JSON each and <machine>.md in here")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.rounds is not None and options.rounds < 1:
        raise InvalidArgumentError(f"--rounds is {options.rounds}, must be at least 1")
    if options.json is not None and options.benchmark == "all":
        raise InvalidArgumentError("--json takes one benchmark; --results takes all")
    known = tuple(GPU_BENCHMARKS) if options.device == "cuda" else BENCHMARKS
    if options.benchmark not in (*known, "all"):
        raise InvalidArgumentError(
            f"bench {options.benchmark} --device {options.device}: {', '.join(known)} and all are there for it"
        )
    results = []
    for name in known if options.benchmark == "all" else (options.benchmark,):
        if options.device == "cuda":
            module = importlib.import_module(f"distca.apps.bench.{GPU_BENCHMARKS[name]}")
            result = getattr(module, name)(options.rounds, options.short)
        else:
            result = importlib.import_module(f"distca.apps.bench.{name}").run(options.rounds, options.short)
        print(result.table(), flush=True)
        results.append(result)
    if options.json is not None:
        results[0].write(options.json)
    if options.results is not None:
        print(f"{write_report(results, options.results)} written")
    return 0
