"""The command `distca doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from distca.apps.common.options import add_debug


def add_command(commands: Any) -> None:
    """Adds `doctor` to the parser of the command line."""
    command = commands.add_parser(
        "doctor",
        help="show what distca finds on this machine and what it will use",
        description="Shows what distca finds on this machine, what it will use, and what to do about what is missing. "
        "A line begins with ok, -- (absent or not in use) or !! (does not work). Exits with 1 if a line has !!.",
    )
    add_debug(command)
    command.set_defaults(run=run)


def run(_options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from distca.apps.doctor.doctor import examine

    findings = examine()
    print("\n".join(map(str, findings)))
    return 0 if all(finding.fine for finding in findings) else 1
