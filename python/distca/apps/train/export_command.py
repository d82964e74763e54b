"""The command `distca export`: the model of a run's last checkpoint, for transformers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distca.apps.common.options import add_debug


def add_command(commands: Any) -> None:
    """Adds `export` to the parser of the command line."""
    command = commands.add_parser(
        "export",
        help="write the trained model of a run in the format of transformers",
        description="Writes the model of a run's last checkpoint, and its tokenizer if it has one, to a folder that "
        "from_pretrained of transformers reads.",
    )
    command.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("folder", metavar="DIR", type=Path, help="folder to write to; it must be new or empty")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises DistcaError for a mistake."""
    from distca.apps.train.export import export_run  # needs transformers

    step = export_run(options.run_dir, options.folder)
    print(f"the model after {step} steps is in {options.folder}")
    return 0
