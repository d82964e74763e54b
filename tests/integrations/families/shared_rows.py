"""Documents that share their first rows, such as answers to one prompt, in the models of transformers."""

from __future__ import annotations

from typing import Any

import torch

import distca
from distca.integrations import hf
from support.branches import Tree
from support.groups import loopback_group, outcomes

from . import tiny
from .reference import Case, Results, gradients, loss_of, run, takes_any_keyword, worst_error
from .verdict import LOSS, norm_of

#: A prompt, two answers that begin at its end and inside of it, one that goes on from the middle of another, and a
#: document that shares nothing.
OWN = [range(0, 40), range(40, 64), range(25, 50), range(55, 60), range(0, 7)]
TREE = Tree([rows.stop for rows in OWN], OWN, {1: 0, 2: 0, 3: 1})
SEGMENTS = [[(0, 0, 30), (2, 25, 50)], [(0, 30, 40), (1, 40, 64), (3, 55, 60), (4, 0, 7)]]
LAYOUT = distca.Layout(SEGMENTS, branches=TREE.branches)


def rows_of(seed: int) -> list[torch.Tensor]:
    """A number for each row that a document has of its own, at the row's place; 0 in the places of shared rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.zeros(length, dtype=torch.int64) for length in TREE.lengths]
    for own, of in zip(TREE.own, rows, strict=True):
        of[own.start :] = torch.randint(2, tiny.VOCABULARY, (len(own),), generator=generator)
    return rows


def _reference(case: Case) -> Results:
    """Each document with all rows of its path, by itself; what is counted are its own rows."""
    model, loss, tokens, targets = case.model("eager"), 0.0, rows_of(1), rows_of(2)
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
    return torch.cat([_in_order_of(rank, documents) for rank in range(len(SEGMENTS))])


def found(case: Case) -> str:
    """ "exact", the reason of a refusal, or what is wrong."""
    try:
        models = [case.model("distca") for _ in SEGMENTS]
        options = {"windows": hf.windows_of(models[0].config), "mask": hf.mask_of(models[0])}
        heads = hf.heads_of(models[0].config, torch.float32)
        plans = distca.plans(LAYOUT, heads, **options, tolerance=0.0, min_rows=1)
    except distca.InvalidArgumentError as error:
        return f"refused: {error}"

    def forward(rank: int, context: distca.Context) -> torch.Tensor:
        tokens = _in_order_of(rank, rows_of(1))
        options: dict[str, Any] = {"position_ids": LAYOUT.position_ids(rank)[None] + case.first_position}
        mine = plans.for_rank(rank)
        if takes_any_keyword(models[rank]):
            return run(models[rank], tokens, **options, plan=mine, distca_context=context).logits[0]
        with distca.using(mine, context=context):
            return run(models[rank], tokens, **options).logits[0]

    def work(rank: int, context: distca.Context) -> Results:
        loss = loss_of(forward(rank, context), _in_order_of(rank, rows_of(2)))
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
    name, error = worst_error(ours, _reference(case), trained=True, loss=LOSS, norm=norm_of(case))
    return "exact" if error <= 1 else f"fails: {name} differs by {error:.2f} of what is allowed"


def _in_order_of(rank: int, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([documents[d][begin:end] for d, begin, end in SEGMENTS[rank]])
