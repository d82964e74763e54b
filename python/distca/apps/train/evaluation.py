"""Evaluation: the mean loss on documents that the run does not train on, by balanced forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from distca.apps.train.checkpoint import Trained
from distca.apps.train.config import TrainConfig
from distca.apps.train.corpus import Corpus
from distca.apps.train.data import Batches
from distca.apps.train.micro_batches import planned
from distca.apps.train.step import mean_loss, sum_of_losses
from distca.context import Context


class Evaluation:
    """Evaluates the model on the same whole batches every time: at most those of `--eval-steps` steps.

    Documents left over after the last whole batch are not used. If all documents do not fill one batch, some occur
    twice in it.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus | None, context: Context, windows: list[int | None]) -> None:
        self._config, self._corpus = config, corpus
        self._context, self._windows = context, windows
        tokens = sum(corpus.lengths()) if corpus is not None else 0
        self._num_batches = min(
            max(1, tokens // config.tokens_per_batch), max(1, config.eval_steps) * config.accumulate
        )

    def due(self, taken: int, interrupted: bool) -> bool:
        """Whether to evaluate after that many steps. An interrupted run does not evaluate."""
        every, last = self._config.eval_every, taken == self._config.steps
        return self._corpus is not None and not interrupted and (last or (every > 0 and taken % every == 0))

    def loss(self, trained: Trained) -> float:
        """The mean loss over all targets of all ranks.

        It is collective. Model and random state are afterwards as they were.
        """
        assert self._corpus is not None
        context = self._context
        batches = Batches(
            self._corpus,
            rank=context.rank,
            ranks=context.num_ranks,
            tokens_per_rank=self._config.tokens_per_rank,
            steps=self._num_batches,
            seed=self._config.seed,
        )
        alone = replace(self._config, accumulate=1, retain_bytes=0)
        balance = self._config.balance == "on"
        loss_sum, num_targets = torch.zeros(()), 0
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            _evaluating(trained.model),
            planned(alone, batches, context, self._windows, balance=balance) as micro_batches,
        ):
            for micro_batch in micro_batches:
                loss_sum += sum_of_losses(trained.model, micro_batch)
                num_targets += micro_batch.num_targets
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
