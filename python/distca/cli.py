"""The command line: `distca train`, `report`, `export`, `plan`, `profile`, `bench` and `doctor`."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distca
from distca.errors import DistcaError, InvalidArgumentError
from distca.launch import RankError

INTERRUPTED = 130
BENCHMARKS = ("attention", "balance", "overhead", "overlap", "plan", "replay", "shards", "transport")
GPU_BENCHMARKS = {"attention": "gpu", "shards": "gpu", "transport": "gpu_transport"}  # and the module of each


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 for a failure, 2 for a mistake in the options, 130 if interrupted."""
    from distca.export_command import add_command as add_export
    from distca.plan_command import add_command as add_plan
    from distca.profile import add_command as add_profile
    from distca.report_command import add_command as add_report
    from distca.train.cli import add_command as add_train

    parser = argparse.ArgumentParser(prog="distca", description="Core attention disaggregation for PyTorch.")
    parser.add_argument("--version", action="version", version=f"distca {distca.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_train(commands)
    add_plan(commands)
    add_profile(commands)
    add_report(commands)
    add_export(commands)
    _add_bench(commands)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print(f"distca {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except DistcaError as error:
        return report(error, options.command, options.debug)


def add_debug(command: argparse.ArgumentParser) -> None:
    """Adds the option that all commands have."""
    command.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def _add_bench(commands: Any) -> None:
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
    command.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    if options.rounds is not None and options.rounds < 1:
        raise InvalidArgumentError(f"--rounds is {options.rounds}, must be at least 1")
    from distca.bench.harness import write_report

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
            module = importlib.import_module(f"distca.bench.{GPU_BENCHMARKS[name]}")
            result = getattr(module, name)(options.rounds, options.short)
        else:
            result = importlib.import_module(f"distca.bench.{name}").run(options.rounds, options.short)
        print(result.table(), flush=True)
        results.append(result)
    if options.json is not None:
        results[0].write(options.json)
    if options.results is not None:
        print(f"{write_report(results, options.results)} written")
    return 0


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="say what was found on this machine and what will be used",
        description="Says what was found on this machine, what will be used, and what to do about what is missing.",
    )
    add_debug(command)
    command.set_defaults(run=_doctor)


def _doctor(_options: argparse.Namespace) -> int:
    from distca.doctor import examine

    findings = examine()
    print("\n".join(map(str, findings)))
    return 0 if all(finding.fine for finding in findings) else 1


def report(error: DistcaError, command: str, debug: bool) -> int:
    """Prints what is wrong, with the traceback where it was asked for or a rank raised what distca cannot explain."""
    if debug:
        traceback.print_exception(error)
    explained = isinstance(error, RankError) and (error.expected or not error.exception)
    message = error.headline if isinstance(error, RankError) and explained else str(error)
    if isinstance(error, RankError) and sys.stderr.isatty():  # a rank that died has left its bar on the line
        print(file=sys.stderr)
    print(f"distca {command}: error: {message}", file=sys.stderr)
    return 2 if isinstance(error, InvalidArgumentError) else 1
