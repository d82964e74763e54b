"""Models of transformers on documents that share their first rows, such as answers to one prompt."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from families.cases import CASES
from families.reference import loss_of, run
from families.shared_rows import OWN, TREE, found, rows_of

import distca
from distca.integrations import hf
from support.groups import loopback_group, on_all_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels

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
    assert verdict.startswith("refused: ") and REFUSED[name] in verdict, verdict


def test_a_model_s_own_loss_takes_branches_whose_own_rows_are_whole() -> None:
    """The first label of a document is left out, as in every packed batch: the row before it is of another one."""
    case = CASES["llama"]
    layout = distca.Layout([[(0, 0, 40), (2, 25, 50)], [(1, 40, 64), (3, 55, 60), (4, 0, 7)]], branches=TREE.parents)
    tokens = rows_of(1)
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
