"""What all commands share: an option, exit codes, and how an error is printed."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from types import FrameType

from distca.connect.launch import RankError
from distca.errors import DistcaError, InvalidArgumentError

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
UNREAD = 141
"""The exit code if the reader of stdout is gone: that of a program which SIGPIPE ends."""


class ConfigError(InvalidArgumentError):
    """An option has a value that is not allowed."""


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM do what Ctrl-C does, in a process that `launch`es ranks."""
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def add_debug(command: argparse.ArgumentParser) -> None:
    """Adds the option `--debug`, which all commands have."""
    command.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def tell(error: DistcaError, command: str, debug: bool) -> int:
    """Prints an error and returns the exit code.

    The traceback is printed if it was asked for, or if a rank raised an error that is not distca's own.
    """
    if debug:
        traceback.print_exception(error)
    explained = isinstance(error, RankError) and (error.expected or not error.exception)
    message = error.headline if isinstance(error, RankError) and explained else str(error)
    if isinstance(error, RankError) and sys.stderr.isatty():  # a rank that died has left its bar on the line
        print(file=sys.stderr)
    print(f"distca {command}: error: {message}", file=sys.stderr)
    return exit_code(error)


def exit_code(error: DistcaError) -> int:
    """The exit code after an error: 2 for a mistake in the options, also one that a launched rank has found."""
    return 2 if isinstance(error, InvalidArgumentError) or (isinstance(error, RankError) and error.mistake) else 1
