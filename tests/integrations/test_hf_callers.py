"""Models of transformers as their users call them: in compiled code, by wrappers, with heads that pool, locally."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import causal_mask_function, sdpa_mask

import distca
from distca.integrations import hf
from distca.integrations.hf_forward import check_loss
from distca.integrations.hf_masks import distca_mask
from distca.registry import open_contexts
from support.groups import loopback_group, on_all_ranks, outcomes

HEADS = distca.Heads(q=4, kv=2, dim=16)
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
IDS = torch.arange(2, 14)[None]
LAYOUT = distca.Layout.from_documents([[12]])
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
OF_TWO_RANKS = distca.Layout([[(0, 0, 6)], [(0, 6, 12)]])


def _model(kind: str = "LlamaForCausalLM", attention: str = "distca", **options: Any) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, kind.split("For")[0] + "Config")
    options = {"pad_token_id": None, "eos_token_id": None, "attn_implementation": attention} | SIZES | options
    return getattr(transformers, kind)(config(**options)).eval()


@pytest.fixture
def plan() -> Iterator[distca.Plan]:
    with distca.init(max_tokens=12, heads=HEADS):
        yield distca.plan(LAYOUT, HEADS)


# ---- compiled code


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_compiled_model_takes_the_plan_of_using(plan: distca.Plan, training: bool) -> None:
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    context = distca.get_context()
    assert context is not None
    wanted = _model()(IDS, use_cache=False, plan=plan).logits
    compiled = torch.compile(_model().train(training), backend="eager")
    compiled(IDS, use_cache=False)  # locally, and compiled
    before = context.step
    with distca.using(plan):
        logits = compiled(IDS, use_cache=False).logits
    assert context.step == before + 2 and torch.equal(logits, wanted)
    compiled(IDS, use_cache=False)
    assert context.step == before + 2


def test_one_graph_that_cannot_see_the_plan_of_using_is_refused(plan: distca.Plan) -> None:
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    compiled = torch.compile(_model(), backend="eager", fullgraph=True)
    with distca.using(plan), pytest.raises(Exception, match=r"pass plan= to the model"):
        compiled(IDS, use_cache=False)
    assert compiled(IDS, use_cache=False, plan=plan).logits.shape == (1, 12, 61)


def test_a_model_that_changes_to_distca_is_compiled_in_one_graph(plan: distca.Plan) -> None:
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    model = _model(attention="sdpa")
    model.set_attn_implementation("distca")
    logits = torch.compile(model, backend="eager", fullgraph=True)(IDS, use_cache=False, plan=plan).logits
    assert torch.equal(logits, _model()(IDS, use_cache=False, plan=plan).logits)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_batches_of_any_lengths_share_a_graph(kind: str) -> None:
    torch._dynamo.reset()  # frames that were left to Python before are compiled again
    options = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    model = _model(kind, **(options if kind == "Gemma2ForCausalLM" else {}))
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    windows = hf.windows_of(model.config)
    with distca.init(max_tokens=200, heads=HEADS) as context:
        for lengths in ([20, 5], [33, 5], [47, 5, 9], [1, 90]):
            layout = distca.Layout.from_documents([lengths])
            plan = (
                distca.plan(layout, HEADS) if windows == [None, None] else distca.plans(layout, HEADS, windows=windows)
            )
            rows = {
                "input_ids": torch.arange(layout.num_rows(0))[None] % 61,
                "position_ids": layout.position_ids(0)[None],
            }
            assert torch.equal(compiled(**rows, plan=plan).logits, model(**rows, plan=plan).logits)
        assert context.step == 2 * 4 * 2
    assert graphs.frame_count == 2, "one of the first batch's number of rows, and one of any number"


# ---- the largest logits


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_a_context_finds_the_largest_logits_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where checkpointing runs layers again in backward. Document 0 has rows on both ranks."""
    plan = distca.plan(OF_TWO_RANKS, HEADS, tolerance=0.0, min_rows=1)
    rows: dict[str, list[torch.Tensor]] = {}
    models = [_model().train() for _ in range(2)]  # threads would draw each other's weights

    def model_of_rank(rank: int, context: distca.Context) -> dict[Any, torch.Tensor]:
        model = models[rank]
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids, positions = IDS[:, 6 * rank : 6 * rank + 6], torch.arange(6 * rank, 6 * rank + 6)[None]
        options = {"use_cache": False, "plan": plan.for_rank(rank), "distca_context": context}
        with context.max_logits() as found:
            model(ids, position_ids=positions, **options).logits.sum().backward()
        return found

    with loopback_group(plan) as contexts:
        of_ranks = on_all_ranks(contexts, model_of_rank)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, layer: str, **options: Any) -> Any:
        rows.setdefault(layer, [q.detach().double(), k.detach().double()])
        return distca.core_attention(q, k, v, *args, layer=layer, **options)

    monkeypatch.setattr(hf, "core_attention", attend)
    with distca.init(max_tokens=12, heads=HEADS):
        _model()(IDS, use_cache=False, plan=distca.plan(LAYOUT, HEADS))
    assert list(rows) == ["0 (LlamaAttention)", "1 (LlamaAttention)"]
    for rank, found in enumerate(of_ranks):
        assert list(found) == list(rows)
        for layer, (q, k) in rows.items():
            scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, dim=1)) / 4
            scores.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)
            right = scores[:, 6 * rank : 6 * rank + 6].amax((1, 2))
            torch.testing.assert_close(found[layer].double(), right, rtol=1e-5, atol=1e-5)


def test_the_largest_logits_of_layers_with_other_numbers_of_heads() -> None:
    options = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    if not hasattr(transformers, "LagunaConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Laguna")
    model = _model(
        "LagunaForCausalLM", num_attention_heads_per_layer=[4, 6], num_experts_per_tok=2, num_experts=4, **options
    )
    heads = hf.heads_of(model.config, torch.float32)
    with distca.init(max_tokens=12, heads=heads) as context, context.max_logits() as found:
        plans = distca.plans(LAYOUT, heads, windows=hf.windows_of(model.config))
        model(IDS, use_cache=False, plan=plans)
    assert [len(of_layer) for of_layer in found.values()] == [4, 6]


#: Layers that have the keys of earlier ones. They leave rows out whose logits nobody wants.
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 5}
SHARED_KEYS |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61}
SHARED_KEYS |= {"global_head_dim": 32}


def _shared_keys(attention: str) -> Any:
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    torch.manual_seed(7)
    given = {"pad_token_id": None, "eos_token_id": None, "attn_implementation": attention} | SIZES | SHARED_KEYS
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**given)).eval()


def test_rows_that_a_model_leaves_out_before_its_last_layers_are_refused_under_a_plan() -> None:
    model = _shared_keys("distca")
    heads, windows = hf.heads_of(model.config, torch.float32), hf.windows_of(model.config)
    last = torch.tensor([10, 11])
    with distca.init(max_tokens=12, heads=heads), torch.no_grad():
        options = {"use_cache": False, "plan": distca.plans(LAYOUT, heads, windows=windows)}
        with pytest.raises(distca.InvalidArgumentError, match=r"leaves rows out .* \(logits_to_keep\), .* as a tensor"):
            model(IDS, logits_to_keep=2, **options)
    with distca.init(max_tokens=12, heads=heads), torch.no_grad():
        ours = model(IDS, logits_to_keep=last, **options).logits
        torch.testing.assert_close(ours, _shared_keys("sdpa")(IDS, use_cache=False).logits[:, last])


def test_reentrant_checkpointing_of_layers_that_take_keys_from_earlier_ones_is_refused() -> None:
    heads = hf.heads_of(_shared_keys("distca").config, torch.float32)
    grads = []
    for reentrant in (None, False, True):
        model = _shared_keys("distca").train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with distca.init(max_tokens=12, heads=heads):
            plans = distca.plans(LAYOUT, heads, windows=hf.windows_of(model.config))
            for _ in range(2):  # the second call finds what the first one has wrapped
                if reentrant:
                    with pytest.raises(distca.InvalidArgumentError, match=r'layers take keys .*"use_reentrant": False'):
                        model(IDS, use_cache=False, plan=plans)
                else:
                    model.zero_grad()
                    model(IDS, use_cache=False, plan=plans).logits.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for name, a, b in zip(dict(model.named_parameters()), *grads[:2], strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)), name


# ---- without a plan


def test_no_mask_is_built_for_rows_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, ...] | None] = []

    def mask(**request: Any) -> torch.Tensor | None:
        made = sdpa_mask(**request)
        built.append(None if made is None else tuple(made.shape))
        return made

    monkeypatch.setattr("distca.integrations.hf_masks.sdpa_mask", mask)
    model = _shared_keys("distca")
    for keep, window, expected in (
        (1, 40, [None] * 4),  # all rows before the last one are hidden from nothing
        (1, 5, [(1, 1, 12, 12), None, (1, 1, 1, 12), None]),
        (3, 40, [None, None, (1, 1, 3, 12), (1, 1, 3, 12)]),
    ):
        model.config.sliding_window = window
        for layer in model.model.layers[::2]:
            layer.self_attn.sliding_window = window
        built.clear()
        model(IDS, logits_to_keep=keep, use_cache=False)
        assert built == expected, (keep, window)


@pytest.mark.parametrize("rows", [slice(2, 3), slice(7, None), slice(-3, None), slice(2, 5)], ids=str)
def test_a_part_of_a_mask_is_those_rows_of_it(rows: slice) -> None:
    whole = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": causal_mask_function}
    part = distca_mask(**whole)[:, :, rows, :]
    expected = sdpa_mask(**whole, allow_is_causal_skip=False)[:, :, rows]
    assert part.shape == expected.shape
    assert expected.all() if (built := part.build()) is None else torch.equal(built, expected)
    with pytest.raises(distca.InvalidArgumentError, match="takes parts of it"):
        distca_mask(**whole)[:, :, ::2, :]


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_local_attention_of_rows_that_are_left_is_that_of_sdpa(keep: int) -> None:
    padding = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
    for options in ({}, {"use_cache": False}, {"input_ids": IDS.repeat(2, 1), "attention_mask": padding}):
        given = {"input_ids": IDS, "logits_to_keep": keep} | options
        ours, sdpa = (_shared_keys(name)(**given).logits for name in ("distca", "sdpa"))
        torch.testing.assert_close(ours, sdpa)


def test_local_attention_of_layers_that_are_not_causal_sees_all_rows() -> None:
    """Layers with a softcap, which SDPA lacks."""

    def logits(attention: str) -> torch.Tensor:
        torch.manual_seed(0)
        module = transformers.T5GemmaModuleConfig(**SIZES).to_dict()
        config = transformers.T5GemmaConfig(encoder=module, decoder=module, vocab_size=61)
        model = transformers.T5GemmaForConditionalGeneration(config).eval()
        model.set_attn_implementation(attention)
        return model(input_ids=IDS, decoder_input_ids=IDS[:, :7], use_cache=False).logits

    assert torch.equal(logits("distca"), logits("eager"))


@pytest.mark.parametrize("kind", ["Gemma2ForCausalLM", "LlamaForCausalLM"])
def test_local_attention_takes_a_mask_of_numbers(kind: str) -> None:
    mask = torch.full((1, 1, 12, 12), -1e9).triu(1)
    ours, own = (_model(kind, attention)(IDS, attention_mask=mask).logits for attention in ("distca", "eager"))
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), [("LlamaForCausalLM", {}), ("MistralForCausalLM", {"sliding_window": 4})])
def test_generation_with_a_static_cache_is_that_of_sdpa(kind: str, options: dict[str, int]) -> None:
    """Its masks are made before the model's forward."""
    how = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    how |= {"cache_implementation": "static", "disable_compile": True}
    ours, own = (_model(kind, attention, **options).generate(IDS, **how) for attention in ("distca", "sdpa"))
    assert torch.equal(ours, own)


@pytest.mark.parametrize("name", ["default", "of another name"])
def test_training_without_a_plan_is_refused_whatever_the_context_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = SimpleNamespace(num_ranks=2, rank=1, _core=None)
    monkeypatch.setitem(open_contexts, name, context)
    model = _model()
    with pytest.raises(distca.InvalidArgumentError, match="no plan in a training step of rank 1 of 2"):
        model.train()(IDS, use_cache=False)
    model.eval()(IDS, use_cache=False)


# ---- losses and heads that look at a whole row of the batch


@pytest.mark.parametrize(
    ("layout", "is_exact"),
    [
        (LAYOUT, True),
        (distca.Layout.from_documents([[5, 7]]), False),
        (distca.Layout([[(0, 0, 12), (distca.PADDING, 0, 3)]]), False),
        (distca.Layout([[(distca.PADDING, 0, 12)]]), False),
    ],
    ids=["a document", "two documents", "padding behind", "padding alone"],
)
def test_a_classifier_takes_one_whole_document_on_each_rank(layout: distca.Layout, is_exact: bool) -> None:
    model = _model("LlamaForSequenceClassification", num_labels=3)
    ids = torch.arange(2, 2 + layout.num_rows(0))[None]
    with distca.init(max_tokens=16, heads=HEADS):
        call = {"position_ids": layout.position_ids(0)[None], "plan": distca.plan(layout, HEADS), "use_cache": False}
        if is_exact:
            own = _model("LlamaForSequenceClassification", "sdpa", num_labels=3)(ids, use_cache=False).logits
            torch.testing.assert_close(model(ids, **call).logits, own, rtol=1e-5, atol=1e-5)
        else:
            with pytest.raises(distca.InvalidArgumentError, match="one result of all rows of rank 0"):
                model(ids, **call)


def test_a_classifier_refuses_a_cut_document() -> None:
    plan = distca.plan(OF_TWO_RANKS, HEADS)

    def work(rank: int, context: distca.Context) -> None:
        model = _model("LlamaForSequenceClassification")
        positions = OF_TWO_RANKS.position_ids(rank)[None]
        model(IDS[:, :6], position_ids=positions, plan=plan.for_rank(rank), distca_context=context, use_cache=False)

    with loopback_group(plan) as contexts:
        results = outcomes(contexts, work)
    assert all("one result of all rows of rank 0" in str(result) for result in results), results


@pytest.mark.parametrize(("ranks", "in_halves"), [(1, False), (2, False), (1, True)])
def test_a_loss_that_is_a_mean_over_rows_is_refused_where_rows_are_apart(ranks: int, in_halves: bool) -> None:
    """That of Bamba's logits."""
    model, labels = _model(z_loss_coefficient=0.5), {"labels": IDS, "shift_labels": IDS}
    layout = LAYOUT if ranks == 1 else OF_TWO_RANKS
    if ranks == 1 and not in_halves:
        return check_loss(model, layout, labels, in_halves)
    with pytest.raises(distca.InvalidArgumentError, match="z_loss_coefficient adds a mean over the rows"):
        check_loss(model, layout, labels, in_halves)
    return check_loss(_model(), layout, labels, in_halves)


class _OldTuner(torch.nn.Module):
    """As in peft 0.18."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class _Tuner(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class _Adapter(torch.nn.Linear):
    pass


@pytest.mark.parametrize("tuner", [_OldTuner, _Tuner])
def test_adapters_that_go_past_the_checks_are_refused(
    plan: distca.Plan, tuner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft: Any = ModuleType("peft.tuners.tuners_utils")
    peft.BaseTuner, peft.BaseTunerLayer = tuner, _Adapter
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", peft)
    model = _model()
    model(IDS, plan=plan, use_cache=False)
    model.model.layers[0].self_attn.q_proj = _Adapter(64, 64)
    if tuner is _Tuner:
        model(IDS, plan=plan, use_cache=False)
    else:
        with pytest.raises(distca.InvalidArgumentError, match="this version of peft calls the forward of the model"):
            model.model(IDS, plan=plan, use_cache=False)


# ---- images


def _with_images() -> Any:
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    text.pop("head_dim")
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def test_images_want_positions_of_three_axes_and_their_encoder_attention_of_its_own(plan: distca.Plan) -> None:
    model = _with_images()
    model.set_attn_implementation("distca")
    call = {"input_ids": IDS.clone(), "plan": plan, "use_cache": False}
    call["input_ids"][0, 3:7] = 60
    call |= {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    positions = LAYOUT.position_ids(0)[None]
    for given in ({}, {"position_ids": positions}):
        with pytest.raises(distca.InvalidArgumentError, match=r"pass position_ids \[3, 1, T\]"):
            model(**call, **given)
    with pytest.raises(distca.InvalidArgumentError, match='"text_config": "distca", "vision_config": "sdpa"'):
        model(**call, position_ids=positions.expand(3, 1, -1))
    model.set_attn_implementation({"text_config": "distca", "vision_config": "sdpa"})
    ours = model(**call, position_ids=positions.expand(3, 1, -1)).logits
    model.set_attn_implementation("sdpa")
    own = model(
        **{name: value for name, value in call.items() if name != "plan"}, position_ids=positions.expand(3, 1, -1)
    )
    torch.testing.assert_close(ours, own.logits, rtol=1e-5, atol=1e-5)


def test_positions_of_three_axes_are_cut_into_halves() -> None:
    layout = distca.Layout.from_documents([[7, 5]])
    model = _with_images()
    model.set_attn_implementation({"text_config": "distca", "vision_config": "sdpa"})
    positions = layout.position_ids(0)[None].expand(3, 1, -1)
    with distca.init(max_tokens=32, heads=HEADS) as context:
        plan = distca.plan(layout, HEADS, context=context)
        whole = model(input_ids=IDS, position_ids=positions, plan=plan, use_cache=False).logits
        halves = hf.plan_halves(layout, HEADS, context=context)
        ours = hf.ping_pong(model)(input_ids=IDS, position_ids=positions, plan=halves, use_cache=False).logits
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


# ---- what is kept of a model


@pytest.mark.parametrize("with_head", [False, True], ids=["base", "with a head"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_a_model_that_its_caller_drops_is_freed(plan: distca.Plan, with_head: bool, checkpointed: bool) -> None:
    model = _model(rope_parameters=LONGROPE).train()
    if not with_head:
        model = model.model
    if checkpointed:
        model.gradient_checkpointing_enable()
    positions = LAYOUT.position_ids(0)[None]
    model(IDS, position_ids=positions, use_cache=False, plan=plan)[0].sum().backward()
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
