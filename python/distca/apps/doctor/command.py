"""The command `distca doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from distca.apps.common.options import add_debug


def add_command(commands: Any) -> None:
    """Adds `doctor` to the parser of the command line."""
    command = commands.add_parser(
        "doctor",
        help="say what was found on this machine and what will be used",
        description="Says what was found on this machine, what will be used, and what to do about what is missing.",
    )
    add_debug(command)
    command.set_defaults(run=run)


def run(_options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from distca.apps.doctor.doctor import examine

    findings = examine()
    print("\n".join(map(str, findings)))
    return 0 if all(finding.fine for finding in findings) else 1
