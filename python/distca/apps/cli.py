"""The command line, `distca`, and its commands."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

import distca
from distca.apps import report
from distca.apps.bench import command as bench
from distca.apps.common import options as common
from distca.apps.doctor import command as doctor
from distca.apps.plan import command as plan
from distca.apps.profile import command as profile
from distca.apps.simulate import command as simulate
from distca.apps.train import cli as train
from distca.apps.train import export_command as export
from distca.apps.verify import command as verify
from distca.errors import DistcaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a mistake in the options, 130 after Ctrl-C, 141 if nobody reads stdout.
    """
    parser = argparse.ArgumentParser(prog="distca", description="Core attention disaggregation for PyTorch.")
    parser.add_argument("--version", action="version", version=f"distca {distca.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for application in (train, plan, simulate, profile, report, export, bench, doctor, verify):
        application.add_command(commands)
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may have characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = int(options.run(options))
        if sys.stdout is not None:  # it is None if it was closed before the program began
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # as of `distca plan | head -1`
        return common.UNREAD
    except KeyboardInterrupt:
        print(f"distca {options.command}: interrupted", file=sys.stderr)
        return common.INTERRUPTED
    except DistcaError as error:
        return common.tell(error, options.command, options.debug)
    except OSError as error:
        return common.tell(DistcaError(str(error)), options.command, options.debug)
