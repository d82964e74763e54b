"""What a model's forward does with a plan: every layer uses it, RoPE sees the longest document, misuse is an error."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

import distca
import distca.integrations.hf  # registers attn_implementation="distca"
from distca.integrations.hf_results import has_own_loss
from support.groups import loopback_group, on_all_ranks, outcomes
from support.models import MHA, VOCABULARY, Family
from support.rope import ROPE

#: A document over two ranks, and a rank that has only padding.
LAYOUT = distca.Layout([[(0, 0, 30), (1, 0, 20)], [(0, 30, 64), (2, 0, 9)], [(-1, 0, 2)]])
ONE_RANK = distca.Layout.from_documents([[5, 3]])
STABLELM = Family("StableLmConfig", {"head_dim": 8}, {None: distca.Heads(4, 2, 8)})
NEMOTRON = Family("NemotronConfig")
Result = tuple[float, dict[str, torch.Tensor]]


def _tokens(layout: distca.Layout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in layout.document_lengths]


def _inputs(layout: distca.Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's input_ids and position_ids, and its shift_labels: the next token in the document of each row."""
    tokens = _tokens(layout)
    parts = {"input_ids": tokens, "shift_labels": [torch.cat([t[1:], torch.tensor([-100])]) for t in tokens]}
    made = {
        name: torch.cat(
            [
                of[document][begin:end]
                if document >= 0
                else torch.full((end - begin,), -100 if "labels" in name else 0)
                for document, begin, end in layout.segments(rank)
            ]
        )[None]
        for name, of in parts.items()
    }
    return made | {"position_ids": layout.position_ids(rank)[None]}


def _loss_and_gradients(model: torch.nn.Module, shift_labels: torch.Tensor, **inputs: Any) -> Result:
    loss = F.cross_entropy(model(**inputs, use_cache=False).logits[0], shift_labels[0], reduction="sum")
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _plans(family: Family, layout: distca.Layout) -> distca.Plans:
    return distca.Plans({w: distca.plan(layout, heads, window=w) for w, heads in family.heads.items()})


def _in_one_process(family: Family, layout: distca.Layout) -> Result:
    """The results of transformers' own attention on all documents packed into one row."""
    return _loss_and_gradients(
        family.model("sdpa"), **_inputs(distca.Layout.from_documents([layout.document_lengths]), 0)
    )


def _on_all_ranks(
    family: Family, layout: distca.Layout, prepare: Callable[[torch.nn.Module, int], None] = lambda model, rank: None
) -> Result:
    plans = _plans(family, layout)
    models = [family.model("distca") for _ in range(layout.num_ranks)]

    def work(rank: int, context: distca.Context) -> Result:
        prepare(models[rank], rank)
        shared = {"plan": plans.for_rank(rank), "distca_context": context}
        return _loss_and_gradients(models[rank], **_inputs(layout, rank), **shared)

    with loopback_group(list(plans.values())) as contexts:
        results = on_all_ranks(contexts, work)
    gradients = {name: sum(of[name] for _, of in results) for name in results[0][1]}
    return sum(loss for loss, _ in results), gradients


def _check_same(found: Result, expected: Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


# ---- RoPE whose frequencies depend on the longest position


@pytest.mark.parametrize("rope", ROPE)
def test_rope_of_the_longest_position_is_that_of_one_process_with_all_documents(rope: str) -> None:
    _check_same(_on_all_ranks(ROPE[rope], LAYOUT), _in_one_process(ROPE[rope], LAYOUT))


def test_dynamic_rope_forgets_what_one_rank_has_evaluated_alone() -> None:
    """transformers alone would keep the frequencies of 200 positions, and on that rank only."""

    def evaluate(model: torch.nn.Module, rank: int) -> None:
        if rank == 1:
            with torch.no_grad():
                model.eval()(torch.zeros(1, 200, dtype=torch.int64), use_cache=False)
            model.train()

    for layout in (LAYOUT, distca.Layout([[(0, 0, 25)], [(0, 25, 35)]])):
        _check_same(_on_all_ranks(ROPE["dynamic"], layout, evaluate), _in_one_process(ROPE["dynamic"], layout))


def test_halves_of_a_layout_know_its_longest_document() -> None:
    first, second = distca.halves(LAYOUT)
    assert {max(half.layout.document_lengths) for half in (first, second)} != {64}
    assert [half.layout.longest_document for half in (first, second)] == [64, 64]
    assert distca.Layout([[(-1, 0, 3)]]).longest_document == 1


# ---- models that do not hand keywords on


@pytest.mark.parametrize("family", [STABLELM, NEMOTRON], ids=["stablelm", "nemotron"])
def test_a_plan_reaches_the_layers_of_a_model_that_drops_keywords(family: Family) -> None:
    _check_same(_on_all_ranks(family, LAYOUT), _in_one_process(family, LAYOUT))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_such_a_model_keeps_the_plan_for_backward(reentrant: bool) -> None:
    def prepare(model: torch.nn.Module, rank: int) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()

    _check_same(_on_all_ranks(STABLELM, LAYOUT, prepare), _in_one_process(STABLELM, LAYOUT))


def _call(
    family: Family, layout: distca.Layout = ONE_RANK, model: Callable[..., Any] | None = None, **options: Any
) -> torch.Tensor:
    """The logits that rank 0's forward returns."""
    model = family.model("distca") if model is None else model
    inputs = {name: value for name, value in _inputs(layout, 0).items() if name != "shift_labels"}
    inputs |= {"plan": _plans(family, layout), "use_cache": False} | options
    with loopback_group(list(_plans(family, layout).values())) as [context, *_]:
        return model(
            **{name: value for name, value in inputs.items() if value is not None}, distca_context=context
        ).logits


def test_a_checkpoint_of_ones_own_that_loses_the_plan_says_so() -> None:
    model = STABLELM.model("distca")

    def train(**inputs: Any) -> None:
        model(**inputs).logits.sum().backward()

    attention = model.model.layers[1].self_attn
    run = attention.forward
    attention.forward = lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)
    with pytest.raises(
        distca.InvalidArgumentError, match=r"runs again in backward .* use model.gradient_checkpointing_enable\(\)"
    ):
        _call(STABLELM, model=train)


def test_using_is_the_keyword_of_the_model_called_inside() -> None:
    plans = _plans(STABLELM, ONE_RANK)
    model, inputs = STABLELM.model("distca"), _inputs(ONE_RANK, 0)
    del inputs["shift_labels"]
    expected = _call(STABLELM, model=model)
    with loopback_group(list(plans.values())) as [context]:
        seen = []
        with distca.using(plans, context=context):
            other = threading.Thread(target=lambda: seen.append(model(**inputs, use_cache=False).logits))
            other.start()
            other.join()
            found = model(**inputs, use_cache=False).logits
            STABLELM.model("sdpa")(**inputs)  # a model with other attention ignores the plan
        assert context.step == 2
        assert torch.equal(found, expected)
        assert (seen[0] - model(**inputs, use_cache=False).logits).norm() == 0, "it holds for one thread, until left"
    with pytest.raises(distca.InvalidArgumentError, match="using: plan is a Tensor; a distca.Plan or distca.Plans"):
        distca.using(plans[None].tensor).__enter__()


def test_a_copy_of_a_model_takes_a_plan_too() -> None:
    model = ROPE["dynamic"].model("distca")
    expected = _call(ROPE["dynamic"], model=model)
    assert torch.equal(_call(ROPE["dynamic"], model=copy.deepcopy(model)), expected)


# ---- a plan that is not used, or not everywhere

GPT = Family(
    "OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, {None: distca.Heads(4, 4, 8)}
)


ROBERTA = Family("RobertaConfig", {"is_decoder": True, "pad_token_id": 1}, {None: distca.Heads(4, 4, 8)})


@dataclasses.dataclass(frozen=True)
class Refused:
    family: Family
    message: str
    layout: distca.Layout = ONE_RANK
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


LLAMA, MIXTRAL = Family("LlamaConfig"), {"num_local_experts": 4, "sliding_window": None}
LABELS = {"labels": _inputs(LAYOUT, 0)["input_ids"]}
REFUSED = {
    "attention goes another way": Refused(
        GPT, r"OpenAIGPTLMHeadModel has 2 layers and calls attention 2 times .* plan was used 0 times: it bypasses"
    ),
    "positions left out where attention is not given them": Refused(
        Family("PersimmonConfig", MHA, {None: distca.Heads(4, 4, 8)}),
        r"left out, .* \(row 5 of rank 0 has position 0 in document 1\): pass position_ids=plan.layout.position_ids",
        options={"position_ids": None},
    ),
    "positions cannot be given": Refused(
        Family("MarianConfig", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "is_decoder": True}),
        r"MarianForCausalLM takes no position_ids: .* \(row 5 of rank 0 has position 0 in document 1\)",
    ),
    "positions that begin after padding": Refused(
        ROBERTA,
        r"row 0 has position 0, its document has 2 there\): pass .*\.unsqueeze\(0\) \+ 2",
    ),
    "no attention": Refused(
        Family("RecurrentGemmaConfig", {"block_types": ["recurrent"], "num_hidden_layers": 2, "lru_width": 32}),
        r"none of the model's layers has attention; their types are ",
        LAYOUT,
    ),
    "labels of a cut document": Refused(
        LLAMA, r"document 0 is cut, .* not in the next row: pass shift_labels=, ", LAYOUT, {"labels": LABELS["labels"]}
    ),
    "a loss of routers": Refused(
        Family("MixtralConfig", MIXTRAL | {"output_router_logits": True}),
        r"output_router_logits adds a loss of the routers, .*: set output_router_logits=False",
        LAYOUT,
    ),
    "noise in routers": Refused(
        Family("MixtralConfig", MIXTRAL | {"router_jitter_noise": 0.1}), r"set router_jitter_noise=0\.0", LAYOUT
    ),
    "no plan": Refused(LLAMA, r"plan is a Tensor, must be a distca\.Plan", options={"plan": torch.zeros(3)}),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of kernels
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_before_any_step_with_the_reason(case: str) -> None:
    refused = REFUSED[case]
    model = refused.family.model("distca")
    with pytest.raises(distca.InvalidArgumentError, match=refused.message):
        _call(refused.family, refused.layout, model=model, **refused.options)


class _OwnLoss(transformers.LlamaForCausalLM):
    """A model that computes its loss itself, and ignores shift_labels."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            output.loss = torch.nn.CrossEntropyLoss()(output.logits[0, :-1], labels[0, 1:])
        return output


def test_labels_of_cut_documents_are_refused_where_the_model_ignores_shifted_ones() -> None:
    model = LLAMA.model("distca")
    model.__class__ = _OwnLoss
    labels = _inputs(LAYOUT, 0)["shift_labels"]
    with pytest.raises(distca.InvalidArgumentError, match="document 0 is cut, and _OwnLoss ignores shift_labels"):
        _call(LLAMA, LAYOUT, model, labels=labels, shift_labels=labels)
    assert torch.equal(_call(LLAMA, model=model, labels=_inputs(ONE_RANK, 0)["shift_labels"]), _call(LLAMA))


@pytest.mark.parametrize(("kind", "own"), [("granite_speech", True), ("qwen2_audio", True), ("llava", False)])
def test_models_that_compute_their_loss_themselves_are_found(kind: str, own: bool) -> None:
    model = transformers.AutoModelForMultimodalLM._model_mapping[type(transformers.AutoConfig.for_model(kind))]
    assert ("CrossEntropyLoss" in inspect.unwrap(model.forward).__code__.co_names) is own
    assert has_own_loss(model.__new__(model)) is own


def test_positions_may_be_left_out_of_whole_documents_and_may_begin_after_padding() -> None:
    layout, model = distca.Layout.from_documents([[8]]), ROBERTA.model("distca").eval()
    positions = layout.position_ids(0)[None] + 2
    assert torch.equal(
        _call(ROBERTA, layout, model, position_ids=None), _call(ROBERTA, layout, model, position_ids=positions)
    )


def test_a_model_that_leaves_a_layer_out_is_refused_with_both_numbers() -> None:
    model = LLAMA.model("distca")
    model.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(
        distca.InvalidArgumentError, match="attention 2 times in a forward pass, but the plan was used 1"
    ):
        _call(LLAMA, model=model)


@pytest.mark.parametrize("module", [torch.nn.Conv1d(1, 1, 2), torch.nn.GRU(1, 1), torch.nn.ZeroPad2d((0, 0, 1, -1))])
def test_a_module_that_looks_along_rows_is_refused_by_name(module: torch.nn.Module) -> None:
    model = LLAMA.model("distca")
    model.model.layers[1].mixer = module
    with pytest.raises(distca.InvalidArgumentError, match=rf"layers\.1\.mixer \({type(module).__name__}\) looks along"):
        _call(LLAMA, model=model)


def test_a_plan_for_a_model_of_another_attention_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"attn_implementation is 'sdpa', .*set_attn_implementation"):
        _call(LLAMA, model=LLAMA.model("sdpa"))
    changed = LLAMA.model("sdpa")
    changed.set_attn_implementation("distca")
    assert torch.equal(_call(LLAMA, model=changed), _call(LLAMA))


def test_shifted_labels_give_the_loss_of_whole_documents() -> None:
    plan, models = _plans(LLAMA, LAYOUT), [LLAMA.model("distca") for _ in range(3)]

    def work(rank: int, context: distca.Context) -> float:
        inputs = _inputs(LAYOUT, rank) | {"plan": plan.for_rank(rank), "distca_context": context}
        return models[rank](**inputs, labels=inputs["input_ids"], num_items_in_batch=90).loss.item()

    with loopback_group(list(plan.values())) as contexts:
        found = sum(on_all_ranks(contexts, work))
    assert found == pytest.approx(_in_one_process(LLAMA, LAYOUT)[0] / 90, rel=1e-6)


def test_no_plan_in_training_is_refused_where_attention_is_never_asked() -> None:
    model = GPT.model("distca")
    with loopback_group(list(_plans(GPT, LAYOUT).values())) as contexts:
        errors = outcomes(contexts, lambda rank, context: model(LABELS["labels"], distca_context=context))
    assert all("no plan in a training step of rank" in str(error) for error in errors), errors


# ---- torch.compile


def _compiled(family: Family, **options: Any) -> torch.nn.Module:
    torch._dynamo.reset()
    return torch.compile(family.model("distca"), backend="eager", **options)


def test_a_whole_model_is_one_graph() -> None:
    family = dataclasses.replace(LLAMA, options={"num_hidden_layers": 1})
    torch.testing.assert_close(_call(family, model=_compiled(family, fullgraph=True)), _call(family))


def test_compiled_models_that_are_known_not_to_use_a_plan_are_refused_as_ever() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="calls attention 2 times .* the plan was used 0 times"):
        _call(GPT, model=_compiled(GPT))


@pytest.mark.parametrize("family", [ROPE["longrope"], STABLELM], ids=["longrope", "stablelm"])
def test_what_graphs_do_not_have_breaks_them_and_is_right(family: Family) -> None:
    family = dataclasses.replace(family, options=family.options | {"num_hidden_layers": 1})
    layout = distca.Layout.from_documents([[50, 20]])
    found = _call(family, layout, model=_compiled(family))
    torch.testing.assert_close(found, _call(family, layout), rtol=1e-5, atol=1e-5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the model needs its plan outside of graphs"):
        _call(family, layout, model=_compiled(family, fullgraph=True))
