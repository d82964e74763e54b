"""Models of transformers whose rows see those after them as those before: encoders of text, and decoders made so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import tiny
from families.cases import CASES
from transformers.masking_utils import and_masks, bidirectional_mask_function

import distca
from distca.integrations import hf, hf_results
from support.groups import loopback_group, on_all_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUT = distca.Layout.from_documents([[30, 7, 11]])
IDS = torch.arange(2, 50)[None]
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"vocab_size": tiny.VOCABULARY, "pad_token_id": 0}


def _modernbert(attention: str = "distca") -> Any:
    return CASES["modernbert, masked"].model(attention).eval()


def _plans(model: Any, layout: distca.Layout = LAYOUT, **options: Any) -> distca.Plans:
    heads, windows = hf.heads_of(model.config, torch.float32), hf.windows_of(model.config)
    return distca.plans(layout, heads, **{"windows": windows, "mask": hf.mask_of(model)} | options)


def _call(model: Any, plan: Any, **inputs: Any) -> Any:
    return model(IDS, position_ids=LAYOUT.position_ids(0)[None], plan=plan, **inputs)


def _alone(model: Any) -> torch.Tensor:
    """The logits of each document by itself."""
    parts = IDS[0].split(LAYOUT.document_lengths)
    with torch.no_grad():
        return torch.cat([model(part[None]).logits[0] for part in parts])


def test_the_mask_of_a_model_is_what_its_layers_and_its_configuration_say() -> None:
    found = {name: hf.mask_of(case.model("eager")) for name, case in CASES.items() if case.entry in ("llama", "gemma2")}
    assert {name for name, mask in found.items() if mask == "full"} == {"llama, both sides", "gemma2, both sides"}
    names = ("bert, masked", "modernbert, masked", "eurobert, masked", "esm, masked", "gemma3_text, both sides")
    assert {hf.mask_of(CASES[name].model("eager")) for name in names if name in CASES} == {"full"}
    assert hf.mask_of(CASES["bert"].model("eager")) == hf.mask_of(CASES["gemma3_text"].model("eager")) == "causal"


def test_windows_reach_as_far_as_the_models_masks() -> None:
    """local_attention is the size of the whole window: half of it lies on either side of a row."""
    config = transformers.ModernBertConfig(local_attention=128, num_hidden_layers=3)
    assert set(hf.windows_of(config)) == {None, 65}
    # EmbeddingGemma 3 counts the row itself to either half.
    config = transformers.Gemma3TextConfig(use_bidirectional_attention=True, sliding_window=512, num_hidden_layers=6)
    assert set(hf.windows_of(config)) == {None, 257}
    assert set(hf.windows_of(transformers.MistralConfig(is_causal=False, sliding_window=50))) == {51}


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_have_the_logits_of_each_alone(compiled: bool) -> None:
    torch._dynamo.reset()
    model = _modernbert()
    plans, expected = _plans(model), _alone(_modernbert("eager"))
    called = torch.compile(model, backend="eager") if compiled else model
    with loopback_group(list(plans.values())) as [context], torch.no_grad():
        logits = _call(called, plans, distca_context=context).logits[0]
        assert context.step == 2
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said", "compiled"),
    [
        ({"mask": "causal"}, "mask is causal, and this layer asks for the full mask: .*mask='full'", False),
        ({"windows": [None, 6]}, "no plan for a window of 7; there are plans for None, 6", False),
        ({"windows": [None, 8]}, "no plan for a window of 7; there are plans for None, 8", False),
        ({"windows": [None, 8]}, "no plan for a window of 7; there are plans for None, 8", True),
    ],
    ids=["causal", "narrower", "wider", "wider, compiled"],
)
def test_plans_of_another_mask_are_refused(options: dict[str, Any], said: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = _modernbert()
    plans = _plans(model, **options)
    model = torch.compile(model, backend="eager") if compiled else model
    with loopback_group(list(plans.values())) as [context], pytest.raises(Exception, match=said):
        _call(model, plans, distca_context=context)


def test_a_graph_cannot_see_into_a_mask_of_the_models_own() -> None:
    torch._dynamo.reset()
    model = CASES["gemma3_text, both sides"].model("distca").eval()
    with pytest.raises(Exception, match="a mask of its own .* call it without torch.compile"):
        _call(torch.compile(model, backend="eager"), _plans(model), use_cache=False)


def test_a_causal_model_refuses_full_plans_also_by_window() -> None:
    model = CASES["mistral"].model("distca").eval()
    plans = _plans(model, mask="full")
    for plan in (plans, next(iter(plans.values()))):
        with pytest.raises(distca.InvalidArgumentError, match="mask is full, and this layer asks for the causal mask"):
            _call(model, plan, use_cache=False)


def test_a_full_mask_with_functions_of_its_own_is_refused() -> None:
    def own(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key != 3

    request = {"batch_size": 1, "q_length": 48, "kv_length": 48, "device": "cpu", "allow_is_bidirectional_skip": True}
    mask = hf.distca_mask(**request, mask_function=and_masks(bidirectional_mask_function, own))
    plan = distca.plan(LAYOUT, distca.Heads(4, 4, 8), mask="full")
    rows = torch.zeros(1, 4, 48, 8)
    with pytest.raises(distca.InvalidArgumentError, match="a full mask with functions of its own"):
        hf.distca_attention(torch.nn.Identity(), rows, rows, rows, mask, plan=plan)


def test_shared_rows_are_refused_because_they_would_see_other_rows_in_each_document() -> None:
    model = _modernbert()
    layout = distca.Layout([[(0, 0, 30), (1, 30, 37), (2, 30, 41)]], branches={1: 0, 2: 0})
    for call in (_plans(model, layout), _plans(model, layout)[None]):
        with pytest.raises(distca.InvalidArgumentError, match="documents begin with rows of others"):
            model(IDS, position_ids=layout.position_ids(0)[None], plan=call)


def test_labels_are_of_the_rows_themselves_also_where_a_document_is_cut() -> None:
    layout = distca.Layout([[(0, 0, 20)], [(0, 20, 30), (1, 0, 18)]])
    models = [CASES["bert, masked"].model("distca") for _ in range(2)]
    plans = _plans(models[0], layout)
    labels = IDS.roll(5).masked_fill(IDS % 3 > 0, -100)

    def work(rank: int, context: distca.Context) -> float:
        rows = slice(20) if rank == 0 else slice(20, None)
        positions, own = layout.position_ids(rank)[None], labels[:, rows]
        call = {"position_ids": positions, "plan": plans.for_rank(rank), "distca_context": context}
        loss = models[rank](IDS[:, rows], labels=own, **call).loss
        loss.backward()
        return loss.item() * int((own != -100).sum())

    with loopback_group(list(plans.values())) as contexts:
        found = on_all_ranks(contexts, work)
    eager = CASES["bert, masked"].model("eager")
    parts = zip(IDS[0].split((30, 18)), labels[0].split((30, 18)), strict=True)
    wanted = sum(eager(ids[None], labels=of[None]).loss.item() * int((of != -100).sum()) for ids, of in parts)
    assert sum(found) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["BertForNextSentencePrediction", "BertForPreTraining", "AlbertForPreTraining"])
def test_models_that_make_one_result_of_a_row_are_refused_where_it_is_not_one_document(kind: str) -> None:
    of = getattr(transformers, kind)
    model = of._from_config(of.config_class(**SIZES), attn_implementation="distca").eval()
    plans = _plans(model)
    with pytest.raises(distca.InvalidArgumentError, match=f"{kind} makes one result of all rows of rank 0"):
        _call(model, plans)


@pytest.mark.parametrize("name", ["modernbert, masked", "roberta, masked"])
def test_a_batch_is_planned_with_the_models_mask_and_positions_whole_or_in_halves(name: str) -> None:
    expected = _alone(CASES[name].model("eager").eval())
    batch = {"input_ids": IDS, "position_ids": LAYOUT.position_ids(0)[None]}
    for model in (CASES[name].model("distca").eval(), hf.ping_pong(CASES[name].model("distca").eval())):
        heads = hf.heads_of(model.config, torch.float32)
        with distca.init(max_tokens=64, heads=heads), torch.no_grad():
            logits = model(**hf.plan_inputs(batch, model)).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    grads = []
    for checkpointed in (False, True):
        model = _modernbert().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        plans = _plans(model)
        with loopback_group(list(plans.values())) as [context]:
            _call(model, plans, distca_context=context).logits.square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 10
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


# ---- losses and results of whole documents


@pytest.mark.parametrize("name", ["modernbert, masked", "eurobert, masked", "esmc, masked"])
def test_the_loss_of_halves_counts_the_first_rows_of_documents(name: str) -> None:
    if name not in CASES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    labels = IDS.roll(3).masked_fill(IDS % 4 > 1, -100)
    labels[:, [0, 30, 37]] = 3
    plain, halved = (CASES[name].model("distca").train() for _ in range(2))
    plans, windows = _plans(plain), hf.windows_of(plain.config)
    halves = hf.plan_halves(LAYOUT, hf.heads_of(plain.config, torch.float32), windows=windows, mask="full")
    call = {"input_ids": IDS, "position_ids": LAYOUT.position_ids(0)[None], "labels": labels}
    with loopback_group([*plans.values(), *(plan for half in halves.plans for plan in half.values())]) as [context]:
        expected = plain(**call, plan=plans, distca_context=context).loss.item()
        found = hf.ping_pong(halved)(**call, plan=halves, distca_context=context).loss.item()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["DistilBertForMaskedLM", "ElectraForPreTraining"])
def test_a_loss_that_a_module_of_the_model_computes_is_its_own(name: str) -> None:
    assert hf_results.has_own_loss(_tiny(name))


def _tiny(name: str, **options: Any) -> Any:
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(**SIZES), attn_implementation="distca", **options).eval()


class _Classifier(transformers.BertForSequenceClassification):
    """A model of the user's own."""


ONE_RESULT = {
    "a pooler": (lambda: _tiny("BertModel"), {}, "BertModel returns pooler_output"),
    "a pooler, in a tuple": (
        lambda: _tiny("BertModel"),
        {"return_dict": False},
        "BertModel returns a tuple with pooler_output",
    ),
    "a class derived from one": (
        lambda: _Classifier._from_config(transformers.BertConfig(**SIZES), attn_implementation="distca").eval(),
        {},
        "_Classifier makes one result of all rows of rank 0",
    ),
    "a softmax over rows": (
        lambda: _tiny("BertForQuestionAnswering"),
        {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([5])},
        "a softmax over all rows of a rank",
    ),
}


@pytest.mark.parametrize(
    ("what", "compiled"), [*((what, False) for what in ONE_RESULT), ("a pooler", True), ("a softmax over rows", True)]
)
def test_one_result_of_a_rank_is_refused_where_it_has_more_than_a_document(what: str, compiled: bool) -> None:
    torch._dynamo.reset()
    make, inputs, said = ONE_RESULT[what]
    model = make()
    called = torch.compile(model, backend="eager") if compiled else model
    plans = _plans(model)
    with loopback_group(list(plans.values())) as [context], pytest.raises(Exception, match=said):
        _call(called, plans, distca_context=context, **inputs)


def test_one_whole_document_has_one_result_also_in_two_segments() -> None:
    layout = distca.Layout([[(0, 0, 10), (0, 10, 48)]])
    for name in ("BertModel", "BertForSequenceClassification"):
        model = _tiny(name)
        plans = _plans(model, layout)
        with loopback_group(list(plans.values())) as [context], torch.no_grad():
            found = model(IDS, position_ids=layout.position_ids(0)[None], plan=plans, distca_context=context)
            model.set_attn_implementation("eager")
            expected = model(IDS)
        for ours, theirs in zip(found.to_tuple(), expected.to_tuple(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_looks_along_rows_outside_of_modules_is_refused_in_graphs_too() -> None:
    torch._dynamo.reset()
    model = CASES["mobilebert, masked"].model("distca").eval()
    plans = _plans(model)
    with loopback_group(list(plans.values())) as [context], pytest.raises(Exception, match="over the borders"):
        _call(torch.compile(model, backend="eager"), plans, distca_context=context)


def test_a_text_model_beside_images_is_causal_though_its_layers_say_otherwise() -> None:
    model = _tiny("CLIPTextModel")
    assert hf.mask_of(model) == "causal"
