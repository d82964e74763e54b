"""The command `distca verify`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distca.apps.common.files import write_given
from distca.apps.common.machine import setting
from distca.apps.common.options import add_debug
from distca.apps.verify.verify import Check, Scope, checks
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES, Heads

#: How rows may travel between the ranks of one machine, by device.
TRANSPORTS = {"cpu": ("shm", "torch"), "cuda": ("cuda-ipc", "nvshmem")}


def add_command(commands: Any) -> None:
    """Adds `verify` to the parser of the command line."""
    command = commands.add_parser(
        "verify",
        help="check on this machine that attention and transports compute what they should",
        description="Computes attention on random documents, with every mask and score that plans may have, on one "
        "rank and on several that exchange rows. Results are held against the same formula in float64: errors may be "
        "little larger than those of a kernel that rounds no more than it must. Ranks together must give the bits of "
        "one rank. A line begins with ok, -- (not available here, with the reason) or !! (wrong). Exits with 1 if a "
        "line has !!, or nothing was available.",
    )
    command.add_argument(
        "--device",
        choices=tuple(TRANSPORTS),
        help="what computes (default: cuda if there is a GPU that distca can use)",
    )
    command.add_argument(
        "--attention", choices=("own", "flash"), help="what computes on a GPU (default: both, where both can)"
    )
    command.add_argument(
        "--ranks",
        type=int,
        help="ranks that exchange rows (default: 3 on the CPU, the number of GPUs, at least 2, on CUDA)",
    )
    command.add_argument(
        "--transports",
        metavar="A,B",
        help="how rows travel between ranks (default: "
        f"{' and '.join(TRANSPORTS['cpu'])} on the CPU, {' and '.join(TRANSPORTS['cuda'])} on CUDA)",
    )
    command.add_argument("--dtype", choices=DTYPES, help="dtype of q, k and v (default: all that the device computes)")
    command.add_argument("--q-heads", type=int, help="query heads of your model (default: several shapes of heads)")
    command.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as --q-heads)")
    command.add_argument("--head-dim", type=int, help="dimension of a query or key head (default: 128)")
    command.add_argument("--v-head-dim", type=int, help="dimension of a value head (default: that of --head-dim)")
    command.add_argument("--seed", type=int, default=0, help="seed of all that is random (default: 0)")
    command.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds after which a rank that does not answer, or a kernel that "
        "does not end, is a fault (default: 120)",
    )
    command.add_argument("--json", type=Path, help="also write the checks, hardware and versions to this file")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    scope = _scope(options)
    if options.json is not None:  # minutes later would be late
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
        except OSError as error:
            raise InvalidArgumentError(f"--json {options.json} cannot be written: {error.strerror}") from error
    facts = setting()
    what = facts["gpu"] if scope.device == "cuda" else f"{facts['cpu']}, kernel {facts['cpu_kernel']}"
    print(f"distca {facts['distca']}, torch {facts['torch']}, {what}", flush=True)
    found: list[Check] = []
    for where, some in itertools.groupby(checks(scope), lambda check: check.where):
        group = list(some)
        print(_lines(where, group), flush=True)
        found += group
    passed, failed = (sum(check.passed is wanted for check in found) for wanted in (True, False))
    print(f"{passed} ok, {len(found) - passed - failed} not available, {failed} wrong")
    if options.json is not None:
        checked = [asdict(check) | {"errors": _without_nan(check.errors)} for check in found]
        content = {"checks": checked, "seed": scope.seed, **facts}
        write_given("--json", options.json, json.dumps(content, indent=1) + "\n")
    return 0 if passed and not failed else 1


def _lines(where: str, group: Sequence[Check]) -> str:
    """One line for all checks that passed, and one for each other."""
    passed = [check for check in group if check.passed]
    lines = []
    if passed:
        worst, result = max((error, name) for check in passed for name, error in check.errors.items())
        lines.append(f"ok {where}: {len(passed)} problems, errors up to {worst:.2f} of those allowed (in {result})")
    for check in group:
        if not check.passed:
            mark = "--" if check.passed is None else "!!"
            lines.append(f"{mark} {where}{', ' * bool(check.problem)}{check.problem}: {check.wrong}")
    return "\n".join(dict.fromkeys(lines))  # a transport that is missing is so for every dtype


def _without_nan(errors: dict[str, float]) -> dict[str, float | None]:
    """The errors with None in the place of NaN, which JSON lacks."""
    return {name: None if math.isnan(error) else error for name, error in errors.items()}


def _scope(options: argparse.Namespace) -> Scope:
    """What to check, as the options say.

    Raises:
        InvalidArgumentError: an option has a value that is not allowed, or there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = num_gpus > 0 and torch.cuda.get_device_capability() >= (8, 0)
    device = options.device or ("cuda" if usable else "cpu")
    if device == "cuda" and not num_gpus:
        raise InvalidArgumentError("--device cuda: PyTorch finds no GPU here")
    if device == "cpu" and options.attention is not None:
        raise InvalidArgumentError("--attention is for --device cuda: the CPU has one kernel")
    transports = TRANSPORTS[device] if options.transports is None else tuple(options.transports.split(","))
    if unknown := [one for one in transports if one not in TRANSPORTS[device]]:
        raise InvalidArgumentError(f"--transports: {unknown[0]!r}; {', '.join(TRANSPORTS[device])} are allowed here")
    ranks = (3 if device == "cpu" else max(2, num_gpus)) if options.ranks is None else options.ranks
    if not 2 <= ranks <= 64:
        raise InvalidArgumentError(f"--ranks is {ranks}; 2 to 64 are allowed")
    if not 1 <= options.timeout <= 1e6:
        raise InvalidArgumentError(f"--timeout is {options.timeout}; 1 to 1e6 seconds are allowed")
    if not 0 <= options.seed < 2**63:
        raise InvalidArgumentError(f"--seed is {options.seed}; 0 to 2**63 - 1 are allowed")
    names = tuple(DTYPES) if options.dtype is None else (options.dtype,)
    dtypes = [DTYPES[name] for name in names if device == "cpu" or name != "fp32"]
    if not dtypes:
        raise InvalidArgumentError("--dtype fp32 is for --device cpu: on CUDA dtypes are bf16 and fp16")
    heads = None
    if options.q_heads is not None:
        kv_heads = options.q_heads if options.kv_heads is None else options.kv_heads
        head_dim = 128 if options.head_dim is None else options.head_dim
        heads = Heads(options.q_heads, kv_heads, head_dim, options.v_head_dim)
    elif any(one is not None for one in (options.kv_heads, options.head_dim, options.v_head_dim)):
        raise InvalidArgumentError("--kv-heads, --head-dim and --v-head-dim need --q-heads")
    attentions = ("own", "flash") if device == "cuda" else ("own",)
    return Scope(
        device=device,
        attentions=attentions if options.attention is None else (options.attention,),
        transports=transports,
        ranks=ranks,
        dtypes=dtypes,
        heads=heads,
        seed=options.seed,
        timeout=options.timeout,
    )
