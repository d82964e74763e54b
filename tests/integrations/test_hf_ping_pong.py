"""Ping-pong inside a model of transformers gives what the model gives for the whole packed row.

The matrices of a half have other shapes than those of the whole row, so results agree up to rounding.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import distca
from distca.integrations import hf
from distca.integrations.hf_ping_pong import HalvedPlans
from support.groups import loopback_group, on_all_ranks
from support.models import FAMILIES, GQA, LENGTHS, VOCABULARY, WINDOW
from support.rope import ROPE

LAYOUT = distca.Layout([[(0, 0, 90)], [(1, 0, 1), (-1, 0, 3), (2, 0, 33), (3, 0, 7)]])


def _inputs(rank: int, context: distca.Context) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(2, VOCABULARY, (LAYOUT.num_rows(rank),), generator=generator)
    labels, row = ids.clone(), 0
    for document, begin, end in LAYOUT.segments(rank):
        labels[row : row + (1 if document >= 0 else end - begin)] = -100
        row += end - begin
    shared = {"position_ids": LAYOUT.position_ids(rank)[None], "distca_context": context, "use_cache": False}
    return {"input_ids": ids[None], "labels": labels[None], **shared}


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2 with windows in the upper layer", "gpt_oss", "longrope"),
        "gemma4 with full layers of other heads",
    ],
)
def test_loss_gradients_and_logits_are_those_of_the_whole_row(family: str) -> None:
    """Rank 0 has one document, so one of its halves has no rows."""
    made = (FAMILIES | ROPE)[family]
    windows = list(made.heads)
    whole = distca.plans(LAYOUT, made.heads, windows=windows, tolerance=0.02)
    halved = [hf.plan_halves(LAYOUT, made.heads, windows=windows, rank=rank, tolerance=0.02) for rank in range(2)]
    models = [[made.model("distca") for _ in range(2)] for _ in range(2)]

    def work(rank: int, context: distca.Context) -> None:
        plain, both = models[rank][0], hf.ping_pong(models[rank][1])
        inputs = _inputs(rank, context)
        expected, found = plain(**inputs, plan=whole.for_rank(rank)), both(**inputs, plan=halved[rank])
        assert found.logits is None, "logits of the whole vocabulary are kept for nothing"
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        expected.loss.backward()
        found.loss.backward()
        for (name, one), other in zip(plain.named_parameters(), both.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 1e-5 * one.grad.norm() + 1e-9, name
        del inputs["labels"]
        with torch.no_grad():
            one, other = (
                model.eval()(**inputs, plan=plan).logits
                for model, plan in ((plain, whole.for_rank(rank)), (both, halved[rank]))
            )
        rows = torch.cat([torch.full((end - begin,), d >= 0) for d, begin, end in LAYOUT.segments(rank)])
        torch.testing.assert_close(other[0, rows], one[0, rows], rtol=1e-4, atol=1e-4)

    plans = [*whole.values(), *(plan for part in halved[0].plans for plan in part.values())]
    with loopback_group(plans) as contexts:
        on_all_ranks(contexts, work)


def test_a_model_in_ping_pong_is_otherwise_the_same_model() -> None:
    model = FAMILIES["llama"].model("distca")
    kind, signature, before = type(model), inspect.signature(model.forward), set(model.state_dict())
    ids = torch.randint(2, VOCABULARY, (1, 9))
    expected = model.eval()(ids).logits
    changed = hf.ping_pong(hf.ping_pong(model))
    assert changed is model and isinstance(model, kind) and type(model).__name__ == kind.__name__
    assert inspect.signature(model.forward) == signature and set(model.state_dict()) == before
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one(ids).logits, expected)


def test_a_plan_of_halves_for_a_model_without_ping_pong_says_what_to_call() -> None:
    halved = hf.plan_halves(distca.Layout.from_documents([LENGTHS]), GQA, windows=[WINDOW])
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    with pytest.raises(distca.InvalidArgumentError, match=r"not in ping-pong: hf\.ping_pong\(model\)"):
        FAMILIES["llama"].model("distca")(ids, plan=halved, use_cache=False)


def test_a_plan_of_halves_for_a_forward_that_was_replaced_says_so() -> None:
    halved = hf.plan_halves(distca.Layout.from_documents([LENGTHS]), GQA, windows=[WINDOW])
    model = hf.ping_pong(FAMILIES["llama"].model("distca"))
    model.forward = lambda **inputs: model.model(**inputs)  # type: ignore[assignment, misc]
    with pytest.raises(distca.InvalidArgumentError, match="forward that was replaced since then .* has no halves"):
        model(input_ids=torch.zeros(1, sum(LENGTHS), dtype=torch.int64), plan=halved, use_cache=False)


class _OwnLoss(LlamaForCausalLM):
    """A model that computes its loss itself: a mean over the rows that it is given."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], labels[0, 1:])
        return output


def test_a_loss_that_does_not_add_up_is_refused() -> None:
    halved = hf.plan_halves(distca.Layout.from_documents([LENGTHS]), GQA)
    model = FAMILIES["llama"].model("distca")
    model.__class__ = _OwnLoss
    model = hf.ping_pong(model)
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.int64)
    with pytest.raises(distca.InvalidArgumentError, match="that of _OwnLoss is a mean: leave out labels="):
        model(input_ids=ids, labels=ids, plan=halved, use_cache=False)


def test_a_trainer_plans_halves_for_a_model_inside_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = hf.ping_pong(FAMILIES["llama"].model("distca"))

    class Batches:
        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return inputs

    class Planned(hf.PlanInputs, Batches):
        pass

    trainer = Planned()
    trainer.model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with distca.init(max_tokens=8, heads=GQA):
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
        inputs = trainer._prepare_inputs({"position_ids": positions})
        assert isinstance(inputs["plan"], HalvedPlans)
        ids = torch.randint(2, VOCABULARY, (1, 8))
        inputs |= {"input_ids": ids, "labels": ids.where(positions > 0, -100), "use_cache": False}
        found = trainer.model(**inputs)
        inputs["plan"] = distca.plan(distca.Layout.from_documents([[5, 3]]), GQA)
        assert found.logits is None, "it has run as a whole"
        assert found.loss.item() == pytest.approx(trainer.model(**inputs).loss.item(), rel=1e-5)
