"""The command `distca bench`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from distca.apps.bench.harness import write_report
from distca.apps.common.options import add_debug
from distca.errors import InvalidArgumentError

#: What each benchmark measures.
BENCHMARKS = {
    "attention": "the local kernel against PyTorch's own attention",
    "balance": "a step of two ranks: balanced, unbalanced, and by other methods",
    "overhead": "what a step adds if nothing needs to move",
    "overlap": "what ping-pong hides of the traffic over an emulated link",
    "pipeline": "attention of a pipeline's ticks: balanced over all stages, inside each, not at all",
    "plan": "balance, bytes and time of plans for 32 to 512 ranks",
    "published": "the simulator beside published figures",
    "replay": "idle shares of 8 ranks; attention sleeps for measured times",
    "shards": "the kernel's rate by the length of the tasks",
    "simulator": "the simulator's steps against steps of `distca train`, calibrated in the same run",
    "transport": "how fast rows reach another process",
    "when-it-pays": "every strategy at its best set-up, modelled: documents, models, clusters, links, kernels",
}
GPU_BENCHMARKS = {"attention": "gpu", "shards": "gpu", "transport": "gpu_transport"}  # the module of each


def add_command(commands: Any) -> None:
    """Adds `bench` to the parser of the command line."""
    command = commands.add_parser(
        "bench",
        help="time distca against alternatives in the same run, and print ratios",
        description="Times what it compares in turns, in one run, and prints ratios.",
        epilog="benchmarks:\n" + "\n".join(f"  {name:<14}{about}" for name, about in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("benchmark", choices=(*BENCHMARKS, "all"), help="what to measure (see below)")
    command.add_argument("--short", action="store_true", help="fewer cases and rounds")
    command.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: attention, shards and transport on a GPU (default: cpu)",
    )
    command.add_argument(
        "--rounds", type=int, default=None, help="how often to measure (default: depends on the benchmark)"
    )
    command.add_argument(
        "--json", type=Path, default=None, help="also write figures, hardware and versions to this file (not with all)"
    )
    command.add_argument(
        "--results",
        type=Path,
        default=None,
        help="also write, to this folder, a JSON file for each benchmark, and one page <machine>.md",
    )
    command.add_argument(
        "--sweep",
        action="store_true",
        help="overlap alone: over traffic, ranks and mixes of documents; --results FOLDER gets JSON, table and picture",
    )
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.rounds is not None and options.rounds < 1:
        raise InvalidArgumentError(f"--rounds is {options.rounds}, must be at least 1")
    if options.json is not None and options.benchmark == "all":
        raise InvalidArgumentError("--json is for one benchmark; use --results for all of them")
    known = tuple(GPU_BENCHMARKS if options.device == "cuda" else BENCHMARKS)
    if options.benchmark not in (*known, "all"):
        raise InvalidArgumentError(
            f"bench {options.benchmark}: --device {options.device} runs {', '.join(known)} or all"
        )
    if options.sweep:
        return _sweep(options)
    results = []
    for name in known if options.benchmark == "all" else (options.benchmark,):
        if options.device == "cuda":
            module = importlib.import_module(f"distca.apps.bench.{GPU_BENCHMARKS[name]}")
            result = getattr(module, name)(options.rounds, options.short)
        else:
            result = importlib.import_module(f"distca.apps.bench.{name.replace('-', '_')}").run(
                options.rounds, options.short
            )
        print(result.table(), flush=True)
        results.append(result)
    if options.json is not None:
        results[0].write(options.json)
    if options.results is not None:
        print(f"{write_report(results, options.results)} written")
    return 0


def _sweep(options: argparse.Namespace) -> int:
    if options.benchmark != "overlap" or options.device != "cpu":
        raise InvalidArgumentError("--sweep is for `distca bench overlap` on the CPU alone")
    from distca.apps.bench.overlap import sweep

    result = sweep(options.rounds, options.short)
    print(result.table(), flush=True)
    if options.json is not None:
        result.write(options.json)
    if options.results is not None:
        print(f"{', '.join(map(str, result.write_all(options.results)))} written")
    return 0
