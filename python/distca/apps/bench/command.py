"""The command `distca bench`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from distca.apps.bench.harness import Result, read_result, write_report
from distca.apps.bench.page import rewrite
from distca.apps.common.options import add_debug
from distca.errors import InvalidArgumentError

#: What each benchmark measures.
BENCHMARKS = {
    "attention": "the local kernel against PyTorch's own attention",
    "balance": "a step of two ranks: balanced, unbalanced, and by other methods",
    "overhead": "what a step adds if nothing needs to move",
    "overlap": "what ping-pong hides of the traffic over an emulated link",
    "padded": "a step of two ranks on padded batches: as the model is, and after hf.unpad",
    "pipeline": "attention of a pipeline's ticks: balanced over all stages, inside each, not at all",
    "plan": "balance, bytes and time of plans for 32 to 512 ranks",
    "published": "the simulator beside published figures",
    "replay": "idle shares of 8 ranks; attention sleeps for measured times",
    "rounds": "a single stream over an emulated link: rows in rounds against rows at once",
    "scaling": "modelled idle shares of attention on 64 to 1,024 GPUs, and what bounds them",
    "shards": "the kernel's rate by the length of the tasks",
    "simulator": "the simulator's steps against steps of `distca train`, calibrated in the same run",
    "transport": "how fast rows reach another process",
    "when-it-pays": "every strategy at its best set-up, modelled: documents, models, clusters, links, kernels",
}
#: Those that write tables of a page, and those that draw a picture.
PAGES, PICTURES = ("scaling", "simulator", "when-it-pays"), ("scaling", "when-it-pays")
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
    command.add_argument(
        "--only",
        metavar="NAME",
        help="when-it-pays alone: this comparison, for example 'documents: equal'; others in the file of --json stay",
    )
    command.add_argument(
        "--strategies",
        metavar="A,B",
        help="with --only: search these strategies alone; the others of that comparison stay as the file has them",
    )
    command.add_argument(
        "--from",
        dest="source",
        type=Path,
        help="measure nothing: take the figures from this file of --json, for --page and --plot",
    )
    command.add_argument(
        "--page",
        type=Path,
        help=f"also rewrite the benchmark's tables in this page of documentation ({', '.join(PAGES)})",
    )
    command.add_argument(
        "--plot", type=Path, help=f"also draw the figures to this PNG file ({', '.join(PICTURES)}; needs matplotlib)"
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
    for option, value, having in (("--page", options.page, PAGES), ("--plot", options.plot, PICTURES)):
        if value is not None and options.benchmark not in having:
            raise InvalidArgumentError(f"{option} is for {', '.join(having)}; bench {options.benchmark} has none")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib: pip install matplotlib")
    if options.only is not None or options.strategies is not None:
        _show(_only(options).content, options)
        return 0
    if options.source is not None:
        if options.page is None and options.plot is None:
            raise InvalidArgumentError("--from is for --page and --plot: give one of them")
        _show(read_result(options.source, options.benchmark), options)
        return 0
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
    _show(results[0].content, options)
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


def _only(options: argparse.Namespace) -> Result:
    if options.only is None:
        raise InvalidArgumentError("--strategies is for --only NAME, the comparison in which to search them")
    if options.benchmark != "when-it-pays" or options.json is None:
        raise InvalidArgumentError("--only is for `distca bench when-it-pays --json FILE` alone")
    if options.results is not None or options.source is not None:
        raise InvalidArgumentError("--only makes one comparison: it cannot be given with --results or --from")
    if options.strategies is not None and options.rounds is not None:
        raise InvalidArgumentError("--strategies keeps the draws of the comparison: it cannot be given with --rounds")
    from distca.apps.bench import when_it_pays

    earlier = read_result(options.json, options.benchmark) if options.json.exists() else None
    strategies = None if options.strategies is None else options.strategies.split(",")
    result = when_it_pays.run_only(options.only, options.rounds, earlier, strategies)
    print(result.table(), flush=True)
    result.write(options.json)
    return result


def _show(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the tables of a page, and the picture, from the content of a file of results."""
    if options.page is not None or options.plot is not None:
        module = importlib.import_module(f"distca.apps.bench.{options.benchmark.replace('-', '_')}_page")
        if options.page is not None:
            rewrite(options.page, options.benchmark, module.tables(content))
        if options.plot is not None:
            module.draw(content, options.plot)
