"""`distca train --track`: sends the figures of every step to a service for runs, in addition to the run's folder."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from distca.apps.train.config import TrainConfig
from distca.errors import DistcaError

FOLDER = "wandb"
"""The folder of a run in which wandb, and nothing else, writes. It has symbolic links."""
_PROJECT, _ID = "distca", "wandb-id"


class Tracker:
    """A run of wandb. wandb's own environment may set another mode or project (WANDB_MODE, WANDB_PROJECT).

    A resumed run goes on under the id that it had.
    """

    def __init__(self, config: TrainConfig, run_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        path = run_dir / _ID
        known = {"id": path.read_text(encoding="utf-8"), "resume": "allow"} if path.exists() else {}
        project = {} if "WANDB_PROJECT" in os.environ else {"project": _PROJECT}
        try:
            self._run = wandb.init(name=run_dir.name, dir=str(run_dir), config=config.as_json(), **project, **known)
        except wandb.Error as error:
            raise DistcaError(f"--track wandb: {error}; WANDB_MODE=offline keeps it on this machine") from error
        path.write_text(self._run.id, encoding="utf-8")

    def step(self, number: int, scalars: dict[str, float]) -> None:
        """Sends the figures of a step, by their names."""
        self._run.log(scalars, step=number)

    def close(self, failed: bool) -> None:
        """Sends what has not been sent yet."""
        self._run.finish(exit_code=int(failed))
