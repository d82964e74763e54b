"""Evaluation: the mean loss on documents that the run does not train on, by balanced forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distca.apps.common.corpus import Corpus
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.step import mean_loss
from distca.apps.train.work import Parallelism
from distca.context import Context


class Evaluation:
    """Evaluates the model on the same whole batches every time: at most those of `--eval-steps` steps.

    Documents left over after the last whole batch are not used. If all documents do not fill one batch, some occur
    twice in it.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus | None, context: Context, run: Parallelism) -> None:
        self._config, self._corpus = config, corpus
        self._context, self._run = context, run
        tokens = sum(corpus.lengths()) if corpus is not None else 0
        self._num_batches = min(
            max(1, tokens // config.tokens_per_batch), max(1, config.eval_steps) * config.micro_batches
        )

    def due(self, taken: int, interrupted: bool) -> bool:
        """Whether to evaluate after that many steps. An interrupted run does not evaluate."""
        every, last = self._config.eval_every, taken == self._config.steps
        return self._corpus is not None and not interrupted and (last or (every > 0 and taken % every == 0))

    def loss(self) -> float:
        """The mean loss over all targets of all ranks.

        It is collective. Model and random state are afterwards as they were.
        """
        assert self._corpus is not None
        run = self._run
        batches = Batches(
            self._corpus,
            rank=run.data_rank,
            ranks=run.data_ranks,
            tokens_per_rank=self._config.tokens_per_rank,
            steps=self._num_batches,
            seed=self._config.seed,
            homes=self._config.homes,
            context=self._config.context,
        )
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluating(run.trained.model):
            loss_sum, num_targets = run.losses(batches, self._context)
        return mean_loss(loss_sum, num_targets)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if hasattr(module, "reshard"):  # FSDP2 does this in backward, and there was none
                module.reshard()
