"""Padded batches of models that went through `hf.unpad`, whose documents begin alike in part."""

from __future__ import annotations

import torch

import distca
from distca.integrations import hf

from . import tiny
from .cases import CASES, expected_kind
from .reference import NO_TARGET, Case, Results, gradients, loss_of, run, worst_error
from .verdict import LOSS, norm_of

#: A prompt and two answers, of which one has two ends; a document that is the prompt's beginning; others.
LENGTHS = (60, 70, 66, 25, 1, 33)
#: The rows of padding on the left of each document.
LEFT = (0, 10, 14, 3, 79, 0)
WIDTH = 80


#: Models whose text part gets embeddings in place of tokens, by which documents could be told to be alike.
_FROM_EMBEDDINGS = ("fuyu", "got_ocr2", "moss_transcribe_diarize")


def is_exact(name: str, share_prompts: bool) -> bool:
    """Whether the model has to take padded batches. One that is refused elsewhere may take those of one rank."""
    case = CASES[name]
    may_share = not case.sees_both_sides and case.entry not in _FROM_EMBEDDINGS
    return expected_kind(name) == "exact" and (may_share or not share_prompts)


def documents() -> list[torch.Tensor]:
    """The tokens of each document."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(2, tiny.VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    for document, alike in ((1, 40), (2, 40), (3, 25)):
        rows[document][:alike] = rows[0][:alike]
    rows[2][:50] = rows[1][:50]
    return rows


def _places() -> list[slice]:
    return [slice(left, left + length) for left, length in zip(LEFT, LENGTHS, strict=True)]


def _targets(document: torch.Tensor) -> torch.Tensor:
    return torch.cat([document[1:], torch.tensor([NO_TARGET])])


def _reference(case: Case) -> Results:
    model, loss = case.model("eager"), 0.0
    for document in documents():
        one = loss_of(run(model.train(), document).logits[0], _targets(document))
        one.backward()
        loss += one.item()
    model.eval()
    with torch.no_grad():
        logits = [run(model, document).logits[0] for document in documents()]
    return Results(loss, gradients(model), torch.cat(logits), 0)


def found(case: Case, share_prompts: bool) -> str:
    """ "exact", the reason of a refusal, or what is wrong."""
    tokens = torch.full((len(LENGTHS), WIDTH), 1)
    mask = torch.zeros_like(tokens)
    for row, (place, document) in enumerate(zip(_places(), documents(), strict=True)):
        tokens[row, place], mask[row, place] = document, 1

    def logits() -> list[torch.Tensor]:
        of_rows = model(input_ids=tokens, attention_mask=mask).logits
        return [of_row[place] for of_row, place in zip(of_rows, _places(), strict=True)]

    try:
        model = hf.unpad(case.model("distca"), share_prompts=share_prompts, min_rows=1)
        with distca.init(max_tokens=tokens.numel(), heads=hf.heads_of(model.config, torch.float32)) as context:
            of_documents = zip(logits_of_training := logits(), documents(), strict=True)
            loss = torch.stack([loss_of(of, _targets(document)) for of, document in of_documents]).sum()
            loss.backward()
            assert context.step > 0 and len(logits_of_training) == len(LENGTHS)
            model.eval()
            with torch.no_grad():
                ours = Results(loss.item(), gradients(model), torch.cat(logits()), 0)
    except distca.InvalidArgumentError as error:
        return f"refused: {error}"
    name, error = worst_error(ours, _reference(case), trained=True, loss=LOSS, norm=norm_of(case))
    return "exact" if error <= 1 else f"fails: {name} differs by {error:.2f} of what is allowed"
