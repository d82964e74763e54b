"""Data parallelism alone: every rank has the whole model, or shards of all of it, and micro-batches of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from distca.apps.common.memory_log import Watch
from distca.apps.train.checkpoint import Trained
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.export import export_model
from distca.apps.train.metrics import AttentionLoads
from distca.apps.train.micro_batches import MicroBatch, planned
from distca.apps.train.model import build_model, wrap
from distca.apps.train.optimizer import make_optimizer
from distca.apps.train.step import UNBALANCED
from distca.connect.init import init
from distca.context import Context
from distca.integrations.hf import heads_of, windows_of
from distca.pingpong.ping_pong import PingPong
from distca.planner.layout import Layout, Window
from distca.trace.trace import Trace


class DataParallel:
    """A run in which every rank has the whole model, wrapped by DDP or FSDP2.

    Attributes:
        trained: what training changes.
        model: the model of transformers.
    """

    def __init__(self, config: TrainConfig, vocabulary: int) -> None:
        self._config = config
        self.model = build_model(config, vocabulary)
        shape = self.model.config.get_text_config()
        self._heads, self._windows = heads_of(shape, config.torch_dtype), windows_of(shape)
        wrapped = wrap(self.model, config)
        optimizer, schedule = make_optimizer(wrapped, config)
        self.trained = Trained(
            wrapped,
            optimizer,
            schedule,
            self.model if config.ping_pong else None,
            config.clip_norm,
            dtype=config.torch_dtype,
        )
        self.data_rank, self.data_ranks = dist.get_rank(), dist.get_world_size()
        self.compared: Sequence[str] = (UNBALANCED,)

    def context(self) -> Context:
        """Makes the context of the run. It is collective."""
        config = self._config
        return init(max_tokens=config.most_rows, heads=self._heads, timeout=config.timeout, nsys=config.nsys)

    @contextmanager
    def steps(self, batches: Batches, context: Context, how: str) -> Iterator[Iterator[MicroBatches]]:
        """The work of all steps, planned ahead. `how` is one of the ways in distca.apps.train.step."""
        config = self._config
        balance = how != UNBALANCED and config.balance == "on"
        with planned(config, batches, context, self._windows, balance=balance) as micro_batches:
            yield (
                MicroBatches(itertools.islice(micro_batches, config.micro_batches), self._windows, context)
                for _ in itertools.count()
            )

    def losses(self, batches: Batches, context: Context) -> tuple[torch.Tensor, int]:
        """The sum of this rank's losses over the batches, and the number of targets of all ranks, by forward alone."""
        alone = replace(self._config, accumulate=1, retain_bytes=0)
        loss_sum, num_targets = torch.zeros(()), 0
        balance = self._config.balance == "on"
        with planned(alone, batches, context, self._windows, balance=balance) as micro_batches:
            for micro_batch in micro_batches:
                loss_sum += _sum_of_losses(self.trained.model, micro_batch, context)
                num_targets += micro_batch.num_targets
        return loss_sum, num_targets

    def export(self, run_dir: Path, folder: Path) -> None:
        """Writes the model to a folder. It is collective."""
        export_model(self.model, run_dir, folder)

    def report(self, run_dir: Path, traces: Sequence[Trace]) -> list[str]:
        """As `Parallelism.report`."""
        return []

    def notes(self) -> list[str]:
        """What a user should know of the run."""
        whole = sum(module.unsharded_bytes for module in self.trained.model.modules() if isinstance(module, PingPong))
        return [f"ping-pong keeps {whole / 1e6:.1f} MB of weights whole on every rank in a step"] if whole else []


@dataclass
class MicroBatches:
    """The micro-batches of a step on this rank. They are planned while the ones before are computed.

    Attributes:
        rest: those that were not asked for yet.
        windows: the window of each layer.
        context: the context that runs the plans.
    """

    rest: Iterable[MicroBatch]
    windows: list[Window]
    context: Context

    def __post_init__(self) -> None:
        self._kept: list[MicroBatch] = []

    def wait(self) -> None:
        """As `Work.wait`."""
        self.rest = list(self.rest)

    def forward_backward(self, trained: Trained, watch: Watch) -> tuple[torch.Tensor, int]:
        """As `Work.forward_backward`."""
        trained.optimizer.zero_grad()
        sums, num_targets = [], 0
        for micro_batch in self.rest:
            self._kept.append(micro_batch)
            watch.begin(micro_batch.arenas)
            with _gradients_added_up(trained, over_ranks=micro_batch.last):
                loss_sum = _sum_of_losses(trained.model, micro_batch, self.context)
                watch.note("forward")
                num_targets = micro_batch.num_targets
                # The ranks' gradients are averaged, but the loss is the mean over targets, and ranks have different
                # numbers of targets.
                (loss_sum * (dist.get_world_size() / max(num_targets, 1))).backward()
            watch.note("backward")
            sums.append(loss_sum.detach())
        return torch.stack(sums).sum(), num_targets

    @property
    def layouts(self) -> list[Layout]:
        """As `Work.layouts`; with ping-pong those of the halves."""
        return [plans.layout for micro_batch in self._kept for plans in micro_batch.plans]

    def loads(self) -> AttentionLoads:
        """As `Work.loads`."""
        return AttentionLoads.of([micro_batch.plans for micro_batch in self._kept], self.windows)


@contextmanager
def _gradients_added_up(trained: Trained, *, over_ranks: bool) -> Iterator[None]:
    """Makes backward add gradients to those of the micro-batches before. After the last one the ranks add up theirs."""
    model = trained.model
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if over_ranks else model.no_sync():
            yield
        return
    sharded: Any = trained.saved or model
    if hasattr(sharded, "set_requires_gradient_sync"):  # FSDP2, whose import takes half a second
        sharded.set_requires_gradient_sync(over_ranks)
    yield


def _sum_of_losses(model: torch.nn.Module, micro_batch: MicroBatch, context: Context) -> torch.Tensor:
    """Cross entropy summed over this rank's targets, fp32. Without targets it is zero, with gradients of zero."""
    inputs = [
        {
            "input_ids": batch.input_ids,
            "position_ids": plan.layout.position_ids(plan.rank).unsqueeze(0),
            "use_cache": False,
            "plan": plan,
            "distca_context": context,
        }
        for batch, plan in micro_batch.parts
    ]
    outputs = [model(**inputs[0])] if len(inputs) == 1 else model(*inputs)
    losses = [
        F.cross_entropy(output.logits.squeeze(0).float(), batch.labels[0], reduction="sum")
        for output, (batch, _) in zip(outputs, micro_batch.parts, strict=True)
    ]
    return torch.stack(losses).sum()
