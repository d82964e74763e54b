"""What the results and the losses of a model of transformers are of: rows, or all rows of a rank together."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from distca.integrations.hf_models import refuse
from distca.planner.layout import PADDING, Layout
from distca.planner.pieces import cut_document, whole_pieces

#: Where a model's forward computes a loss. All but transformers' own function know no shift_labels.
_LOSSES = re.compile(r"\b(?:loss_function|\w*loss_fct|\w*loss_fn|\w*Loss|cross_entropy)\(")
#: How the classes of models end that make one result of a whole row of the batch.
_POOLING = (
    *("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "DoubleHeadsModel"),
    *("NeoMMEForRetrieval", "SplinterForQuestionAnswering"),
)
#: How the classes of models end whose labels are of the rows themselves, not of the rows after them.
_LABELS_OF_ROWS = ("ForMaskedLM", "ForTokenClassification", "ElectraForPreTraining")


def check_pooling(model: PreTrainedModel, layout: Layout) -> None:
    """Refuses models that make one result of a whole row of the batch, where that is not one document."""
    rank = rank_of_several_documents(layout) if pools(type(model)) else None
    refuse(
        rank is not None,
        f"{type(model).__name__} makes one result of all rows of rank {rank}, which are not one whole document: take "
        "the result of the model inside, and pool the rows of each document yourself",
    )


def rank_of_several_documents(layout: Layout) -> int | None:
    """The first rank whose rows are not those of one whole document; None if there is none."""
    cut = cut_document(layout) is not None or bool(layout.branches)
    for rank in range(layout.num_ranks):
        pieces = whole_pieces(layout, rank)
        if cut or len(pieces) != 1 or pieces[0][0] == PADDING:
            return rank
    return None


def pools(kind: type[PreTrainedModel]) -> bool:
    """Whether a model of this class makes one result of a whole row of the batch. Some take labels of whole documents
    beside those of rows, as in BERT's pretraining.
    """
    of_documents = {"next_sentence_label", "sentence_order_label"} & {*inspect.signature(kind.forward).parameters}
    return is_one_of(kind, _POOLING) or bool(of_documents)


def has_labels_of_rows(model: PreTrainedModel) -> bool:
    """Whether a row's label is its own target, so that a model shifts no labels."""
    return is_one_of(type(model), _LABELS_OF_ROWS)


def has_own_loss(model: PreTrainedModel) -> bool:
    """Whether the model's loss is the mean over the rows of its tensor, whatever shift_labels says."""
    return _has_own_loss(type(model).forward)


@functools.cache
def _has_own_loss(forward: Callable[..., Any]) -> bool:
    """Whether a forward computes a loss, and hands neither shift_labels nor all of its keywords to it. Its source says
    this. Granite Speech and Qwen2-Audio are such models, and Gemma 3 and Qwen 3.5 with images up to transformers 5.16.
    """
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # a forward without a source is taken to use transformers' loss
        return False
    calls = [_arguments(source[found.end() :]) for found in _LOSSES.finditer(source)]
    return bool(calls) and not any("**" in call or "shift_labels=" in call for call in calls)


def _arguments(source: str) -> str:
    """What comes before the bracket that closes a call. Not by ast, which fails in several threads of Python 3.11."""
    depth = 1
    for end, letter in enumerate(source):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return source[:end]
    return source


def is_one_of(kind: type, endings: tuple[str, ...]) -> bool:
    """Whether the name of the class, or of one that it is derived from, ends so."""
    return any(base.__name__.endswith(endings) for base in kind.__mro__)
