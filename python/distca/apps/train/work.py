"""What the trainer needs to know of how processes share a run: data parallelism alone, or a split model as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from distca.apps.common.memory_log import Watch
    from distca.apps.train.checkpoint import Trained
    from distca.apps.train.data import Batches
    from distca.apps.train.metrics import AttentionLoads
    from distca.context import Context
    from distca.planner.layout import Layout
    from distca.trace.trace import Trace


class Work(Protocol):
    """The micro-batches of a step with their plans."""

    def wait(self) -> None:
        """Waits until all plans are made."""

    def forward_backward(self, trained: Trained, watch: Watch) -> tuple[torch.Tensor, int]:
        """Leaves the gradients of the step's mean loss in the model.

        Returns:
            The sum of this process's losses, and the number of targets of all processes.
        """

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the micro-batches, over their data ranks."""

    def loads(self) -> AttentionLoads:
        """The attention of the step, by ranks of the context. The work is done before."""


class Parallelism(Protocol):
    """How the processes of a run share it.

    Attributes:
        trained: what training changes.
        model: the model of transformers, or this process's part of it.
        data_rank, data_ranks: this process's rank among those that hold different rows, and their number.
        compared: the ways of planning with which `--compare` compares balance.
    """

    trained: Trained
    model: PreTrainedModel
    data_rank: int
    data_ranks: int
    compared: Sequence[str]

    def context(self) -> Context:
        """Makes the context of the run. It is collective."""

    def steps(self, batches: Batches, context: Context, how: str) -> AbstractContextManager[Iterator[Work]]:
        """The work of all steps, planned ahead. `how` is one of the ways in distca.apps.train.step."""

    def losses(self, batches: Batches, context: Context) -> tuple[torch.Tensor, int]:
        """The sum of this process's losses over the batches, and the number of targets of all, by forward alone."""

    def export(self, run_dir: Path, folder: Path) -> None:
        """Writes the model to a folder, after the run's last checkpoint. It is collective."""

    def report(self, run_dir: Path, traces: Sequence[Trace]) -> list[str]:
        """What the report says of this parallelism, in paragraphs of Markdown. It is collective.

        `traces` are those of all processes, on rank 0, if the run was traced.
        """

    def notes(self) -> list[str]:
        """What a user should know of the run."""
