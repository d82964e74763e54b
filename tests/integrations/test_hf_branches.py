"""Models of transformers on documents that share their first rows, such as answers to one prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from families import tiny
from families.cases import CASES
from families.reference import Case, Results, gradients, loss_of, run, takes_any_keyword, worst_error
from families.verdict import LOSS, NORM

import distca
from distca.integrations import hf
from support.branches import Tree
from support.groups import loopback_group, on_all_ranks, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels

#: A prompt, two answers that begin at its end and inside of it, one that goes on from the middle of another, and a
#: document that shares nothing.
OWN = [range(0, 40), range(40, 64), range(25, 50), range(55, 60), range(0, 7)]
TREE = Tree([rows.stop for rows in OWN], OWN, {1: 0, 2: 0, 3: 1})
SEGMENTS = [[(0, 0, 30), (2, 25, 50)], [(0, 30, 40), (1, 40, 64), (3, 55, 60), (4, 0, 7)]]
LAYOUT = distca.Layout(SEGMENTS, branches=TREE.parents)

EXACT = (
    *("llama", "gpt2", "roberta", "gpt_bigcode", "mistral", "cohere2", "diffllama", "hrm_text"),
    *("gemma2", "gpt_oss", "deepseek_v2", "qwen3_moe", "gemma3", "stablelm", "jetmoe"),
    "llama4_text, chunks and temperature",
)
REFUSED = {
    "qwen3_next": "document 1 would have to go on from that of document 0, off which it branches",
    "falcon_h1": "document 1 would have to go on from that of document 0",
    "lfm2_moe": "document 1 would have to go on from that of document 0",
    "bart": "positions in the documents",
}


def _rows(seed: int) -> list[torch.Tensor]:
    """A number for each row that a document has of its own, at the row's place; 0 in the places of shared rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.zeros(length, dtype=torch.int64) for length in TREE.lengths]
    for own, of in zip(TREE.own, rows, strict=True):
        of[own.start :] = torch.randint(2, tiny.VOCABULARY, (len(own),), generator=generator)
    return rows


def _reference(case: Case) -> Results:
    """Each document with all rows of its path, by itself; what is counted are its own rows."""
    model, loss, tokens, targets = case.model("eager"), 0.0, _rows(1), _rows(2)
    paths = [torch.cat([tokens[d][rows.start : rows.stop] for d, rows in TREE.path(document)])
             for document in range(len(OWN))]  # fmt: skip
    for path, own, of_rows in zip(paths, TREE.own, targets, strict=True):
        one = loss_of(run(model.train(), path).logits[0][own.start :], of_rows[own.start :])
        one.backward()
        loss += one.item()
    model.eval()
    with torch.no_grad():
        logits = [run(model, path).logits[0] for path in paths]
    return Results(loss, gradients(model), _in_order(logits), 0)


def _in_order(documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([documents[d][begin:end] for of_rank in SEGMENTS for d, begin, end in of_rank])


def found(case: Case) -> str:
    """ "exact", the reason of a refusal, or what is wrong."""
    try:
        models = [case.model("distca") for _ in SEGMENTS]
        windows = hf.windows_of(models[0].config)
        plans = distca.plans(
            LAYOUT, hf.heads_of(models[0].config, torch.float32), windows=windows, tolerance=0.0, min_rows=1
        )
    except distca.InvalidArgumentError as error:
        return f"refused: {error}"

    def forward(rank: int, context: distca.Context) -> torch.Tensor:
        tokens = _in_order_of(rank, _rows(1))
        options: dict[str, Any] = {"position_ids": LAYOUT.position_ids(rank)[None] + case.first_position}
        mine = plans.for_rank(rank)
        if takes_any_keyword(models[rank]):
            return run(models[rank], tokens, **options, plan=mine, distca_context=context).logits[0]
        with distca.using(mine, context=context):
            return run(models[rank], tokens, **options).logits[0]

    def work(rank: int, context: distca.Context) -> Results:
        loss = loss_of(forward(rank, context), _in_order_of(rank, _rows(2)))
        loss.backward()
        models[rank].eval()
        with torch.no_grad():
            return Results(loss.item(), gradients(models[rank]), forward(rank, context), 0)

    for model in models:
        model.train()
    with loopback_group(list(plans.values()), timeout=20.0) as contexts:
        results = outcomes(contexts, work)
    errors = [one for one in results if isinstance(one, BaseException)]
    if len(errors) == 2 and all(isinstance(error, distca.InvalidArgumentError) for error in errors):
        return f"refused: {errors[0]}"
    if errors:
        return f"fails: {errors}"
    first, second = results
    grads = {name: first.grads[name] + second.grads[name] for name in first.grads}
    ours = Results(first.loss + second.loss, grads, torch.cat([first.logits, second.logits]), 0)
    name, error = worst_error(ours, _reference(case), trained=True, loss=LOSS, norm=NORM)
    return "exact" if error <= 1 else f"fails: {name} differs by {error:.2f} of what is allowed"


def _in_order_of(rank: int, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([documents[d][begin:end] for d, begin, end in SEGMENTS[rank]])


@pytest.mark.parametrize("name", EXACT)
def test_own_rows_are_computed_as_if_each_document_were_alone_with_all_its_rows(name: str) -> None:
    if name not in CASES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    assert found(CASES[name]) == "exact"


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_branches_cannot_be_told_are_refused(name: str) -> None:
    if name not in CASES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    verdict = found(dataclasses.replace(CASES[name], whole=False))
    assert verdict.startswith("refused: ") and any(part in verdict for part in REFUSED[name].split("|")), verdict


def test_a_model_s_own_loss_takes_branches_whose_own_rows_are_whole() -> None:
    """The first label of a document is left out, as in every packed batch: the row before it is of another one."""
    case = CASES["llama"]
    layout = distca.Layout([[(0, 0, 40), (2, 25, 50)], [(1, 40, 64), (3, 55, 60), (4, 0, 7)]], branches=TREE.parents)
    tokens = _rows(1)
    labels = [
        torch.cat([torch.full((own.start + 1,), -100), rows[own.start + 1 :]])
        for own, rows in zip(OWN, tokens, strict=True)
    ]
    model, wanted = case.model("eager").eval(), 0.0
    with torch.no_grad():
        for document, own in enumerate(OWN):
            path = torch.cat([tokens[d][rows.start : rows.stop] for d, rows in TREE.path(document)])
            logits = run(model, path).logits[0]
            wanted += loss_of(logits[own.start : -1], path[own.start + 1 :]).item()
    models = [case.model("distca").eval() for _ in range(2)]
    plan = distca.plan(layout, hf.heads_of(models[0].config, torch.float32))

    def work(rank: int, context: distca.Context) -> float:
        of_rank = [
            torch.cat([one[d][begin:end] for d, begin, end in layout.segments(rank)]) for one in (tokens, labels)
        ]
        positions = layout.position_ids(rank)[None]
        with torch.no_grad():
            loss = run(models[rank], of_rank[0], position_ids=positions, labels=of_rank[1][None],
                       plan=plan.for_rank(rank), distca_context=context).loss  # fmt: skip
        return loss.item() * int((of_rank[1] != -100).sum())

    with loopback_group(plan) as contexts:
        assert sum(on_all_ranks(contexts, work)) == pytest.approx(wanted, rel=1e-5)
