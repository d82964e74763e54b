"""Models of transformers on documents that share their first rows, such as answers to one prompt."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import tiny
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
    *("llama4_text, chunks and temperature", "qwen3_next", "falcon_h1", "lfm2_moe"),
)


@pytest.mark.parametrize("name", EXACT)
def test_own_rows_are_computed_as_if_each_document_were_alone_with_all_its_rows(name: str) -> None:
    if name not in CASES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    assert found(CASES[name]) == "exact"


def test_a_model_that_branches_cannot_be_told_is_refused() -> None:
    verdict = found(CASES["bart"])
    assert verdict.startswith("refused: ") and "positions in the documents" in verdict, verdict


def test_a_model_s_own_loss_takes_branches_whose_own_rows_are_whole() -> None:
    """The first label of a document is left out, as in every packed batch: the row before it is of another one."""
    case = CASES["llama"]
    layout = distca.Layout([[(0, 0, 40), (2, 25, 50)], [(1, 40, 64), (3, 55, 60), (4, 0, 7)]], branches=TREE.branches)
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


WITH_MASKS = pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "gemma2"])


@WITH_MASKS
def test_a_model_on_noised_blocks_has_the_logits_of_transformers_under_the_mask_of_block_diffusion(name: str) -> None:
    """Clean rows and noised ones of three documents on two ranks."""
    rows = 8
    clean = distca.Layout([[(0, 0, 30)], [(0, 30, 41), (1, 0, 20), (2, 0, 5)]])
    kinds = [
        (document, row, noised)
        for rank in range(2)
        for noised in (False, True)
        for document, begin, end in clean.segments(rank)
        for row in range(begin, end)
    ]
    document, position, noised = (torch.tensor(of_rows) for of_rows in zip(*kinds, strict=True))
    block, other = position[:, None] // rows, position[None] // rows
    sees = (document[:, None] == document[None]) & torch.where(
        noised[:, None], torch.where(noised[None], block == other, other < block), ~noised[None] & (other <= block)
    )
    near = position[None] > position[:, None] - _window(name)
    _check_logits(name, clean.block_diffusion(rows), sees, sees & near)


@WITH_MASKS
def test_a_model_on_passages_that_do_not_see_each_other_has_the_logits_of_transformers_under_that_mask(
    name: str,
) -> None:
    """Two questions to three passages on two ranks: one to all of them, in another order, and one to parts of two."""
    begins = {3: [(2, 0, 9), (0, 0, 30), (1, 0, 20)], 4: [(1, 5, 20), (0, 0, 12)]}
    layout = distca.Layout(
        [[(0, 0, 30), (4, 27, 33)], [(2, 0, 9), (3, 59, 75), (1, 0, 20), (4, 33, 40)]], branches=begins
    )
    rows = [(document, row) for rank in range(2) for document, begin, end in layout.segments(rank)
            for row in range(begin, end)]  # fmt: skip
    keys = [  # of each document, the rows that it has in its order, as they are numbered here
        [rows.index((of, row)) for of, begin, end in begins.get(document, ()) for row in range(begin, end)]
        + sorted(i for i, (d, _) in enumerate(rows) if d == document)
        for document in range(5)
    ]
    sees, near = (torch.zeros(len(rows), len(rows), dtype=torch.bool) for _ in range(2))
    for i, (document, row) in enumerate(rows):
        sees[i, keys[document][: row + 1]] = True
        near[i, keys[document][max(0, row + 1 - _window(name)) : row + 1]] = True
    _check_logits(name, layout, sees, near)


def _window(name: str) -> int:
    return getattr(CASES[name].model("eager").config, "sliding_window", None) or 100


def _check_logits(name: str, layout: distca.Layout, full: torch.Tensor, sliding: torch.Tensor) -> None:
    """On two ranks, against eager attention with masks of four dimensions: what rows see in layers without a window and
    with one.
    """
    case = CASES[name]
    ids = torch.randint(2, tiny.VOCABULARY, (len(full),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([layout.position_ids(rank) for rank in range(2)])
    models = [case.model("distca").eval() for _ in range(2)]
    config = models[0].config
    plans = distca.plans(layout, hf.heads_of(config, torch.float32), windows=hf.windows_of(config))
    masks = [
        torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) for seen in (full, sliding)
    ]
    mask = masks[0] if len(plans) == 1 else {"full_attention": masks[0], "sliding_attention": masks[1]}
    with torch.no_grad():
        right = run(case.model("eager").eval(), ids, position_ids=positions[None], attention_mask=mask).logits[0]

    def work(rank: int, context: distca.Context) -> torch.Tensor:
        begin = sum(layout.num_rows(r) for r in range(rank))
        mine = slice(begin, begin + layout.num_rows(rank))
        with torch.no_grad():
            return run(models[rank], ids[mine], position_ids=layout.position_ids(rank)[None],
                       plan=plans.for_rank(rank), distca_context=context).logits[0]  # fmt: skip

    with loopback_group(list(plans.values())) as contexts:
        logits = torch.cat(on_all_ranks(contexts, work))
    torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)
