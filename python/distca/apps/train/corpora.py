"""The documents on which a run trains, and those on which it evaluates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distca.apps.common.corpus import Corpus, read_corpus
from distca.apps.common.sources import DataError
from distca.apps.train.config import TrainConfig

if TYPE_CHECKING:
    from distca.apps.common.tokens import Tokenizer


def read_corpora(
    config: TrainConfig, tokenizer: Tokenizer | None, *, show_progress: bool = False
) -> tuple[Corpus, Corpus | None]:
    """The documents to train on, and the documents to evaluate on or None."""
    corpus = read_corpus(config.data, config.kept_fraction, tokenizer, show_progress=show_progress)
    if config.eval_fraction is not None:
        return corpus.split(config.eval_fraction, config.seed)
    if config.eval_data is not None:
        return corpus, read_corpus(config.eval_data, config.doc_scale or 1.0, tokenizer, show_progress=show_progress)
    return corpus, None


def check_held_out(held_out: Corpus | None, vocabulary: int) -> None:
    """Raises DataError if the documents to evaluate on have a token that the model does not know."""
    if held_out is not None and held_out.largest >= vocabulary:
        raise DataError(
            f"--eval-data has token {held_out.largest}, and the model knows {vocabulary}: give documents whose tokens "
            "are made as those of --data, or a --model with a larger vocabulary"
        )
