"""`distca profile`: measures this machine, for plans (attention alone) or for the simulator (all that a step has)."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from distca.apps.common.files import write_given
from distca.apps.common.machine import setting
from distca.apps.common.options import add_debug
from distca.apps.profile import attention
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES, Heads

#: Hidden sizes of the models whose products are measured by default.
HIDDEN = (128, 256, 512)


def add_command(commands: Any) -> None:
    """Adds `profile` to the parser of the command line."""
    command = commands.add_parser(
        "profile",
        help="measure this machine, and write a cost model or a cluster of the simulator",
        description="Times forward and backward of single tasks of many sizes on this machine's CPU, and writes the "
        "times as JSON. distca.CostModel.load and `distca plan --cost FILE` read the file. With --cluster it measures "
        "all that a training step has, and `distca simulate --cluster FILE` reads the file.",
    )
    command.add_argument("--q-heads", type=int, default=8, help="query heads (default: 8)")
    command.add_argument("--kv-heads", type=int, default=2, help="key/value heads (default: 2)")
    command.add_argument("--head-dim", type=int, default=64, help="dimension of a head (default: 64)")
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of q, k and v (default: fp32)")
    command.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often to time each task (default: 3); the shortest time counts, with --cluster the median",
    )
    command.add_argument(
        "--cluster",
        action="store_true",
        help="measure attention, matrix products, what memory binds, and links, with one process a rank",
    )
    command.add_argument("--ranks", type=int, help="with --cluster: ranks, of one thread each (default: the cores)")
    command.add_argument(
        "--hidden",
        help="with --cluster: hidden sizes of the Llamas whose products are measured (default: "
        f"{','.join(map(str, HIDDEN))})",
    )
    command.add_argument("--out", type=Path, required=True, help="file to write")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.rounds < 1:
        raise InvalidArgumentError(f"--rounds is {options.rounds}, must be at least 1")
    heads = Heads(options.q_heads, options.kv_heads, options.head_dim, dtype=DTYPES[options.dtype])
    if options.cluster:
        return _cluster(options, heads)
    for name in ("ranks", "hidden"):
        if getattr(options, name) is not None:
            raise InvalidArgumentError(f"--{name} needs --cluster")
    points = attention.grid(heads, options.rounds)
    write_given("--out", options.out, json.dumps(attention.cost_table(heads, points) | setting(), indent=1) + "\n")
    print(f"{len(points)} task sizes measured; {options.out} written")
    return 0


def _cluster(options: argparse.Namespace, heads: Heads) -> int:
    if options.dtype != "fp32":
        raise InvalidArgumentError(f"--dtype is {options.dtype}, must be fp32 with --cluster")
    ranks = len(os.sched_getaffinity(0)) if options.ranks is None else options.ranks
    if ranks < 2:
        raise InvalidArgumentError(f"--ranks is {ranks}, must be at least 2, because links are measured")
    try:
        hidden = HIDDEN if options.hidden is None else tuple(int(one) for one in options.hidden.split(","))
    except ValueError:
        hidden = ()
    if not hidden or min(hidden) < heads.dim or any(one % heads.dim for one in hidden):
        raise InvalidArgumentError(f"--hidden is {options.hidden}, must be multiples of --head-dim, such as 128,256")
    from distca.apps.profile.cluster import measure_cluster  # loads what only tests and benchmarks need

    cluster = measure_cluster(heads, hidden, ranks, options.rounds)
    write_given("--out", options.out, json.dumps({"sources": setting(), **cluster}, indent=1) + "\n")
    print(f"{ranks} ranks measured; {options.out} written")
    return 0
