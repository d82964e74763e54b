"""Model families of transformers with attn_implementation="distca" have the loss and gradients of SDPA on each
document.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import distca
from distca.integrations import hf
from support.groups import loopback_group, on_all_ranks
from support.models import FAMILIES, GQA, LENGTHS, MHA, VOCABULARY, WINDOW, Family


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def _targets() -> list[torch.Tensor]:
    return [torch.cat([tokens[1:], torch.tensor([-100])]) for tokens in _tokens()]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _reference(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = FAMILIES[family].model(FAMILIES[family].reference)
    total = 0.0
    for tokens, targets in zip(_tokens(), _targets(), strict=True):
        loss = _loss(model(tokens[None], use_cache=False).logits[0], targets)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def _on_two_ranks(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    heads = FAMILIES[family].heads
    layout = distca.Layout.packed(LENGTHS, ranks=2, tokens_per_rank=70)
    plans = distca.Plans({w: distca.plan(layout, heads[w], window=w, tolerance=0.02) for w in heads})
    models = [FAMILIES[family].model("distca") for _ in range(2)]

    def run(rank: int, context: distca.Context) -> tuple[float, dict[str, torch.Tensor]]:
        model, mine, segments = models[rank], plans.for_rank(rank), layout.segments(rank)
        tokens = torch.cat([_tokens()[d][begin:end] for d, begin, end in segments])
        targets = torch.cat([_targets()[d][begin:end] for d, begin, end in segments])
        logits = model(
            tokens[None],
            position_ids=layout.position_ids(rank)[None],
            use_cache=False,
            plan=mine if len(mine) > 1 else next(iter(mine.values())),
            distca_context=context,
        ).logits
        loss = _loss(logits[0], targets)
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    with loopback_group(list(plans.values())) as contexts:
        results = on_all_ranks(contexts, run)
        assert [context.step for context in contexts] == [4, 4], "a layer's attention went another way"
    (loss_a, grads_a), (loss_b, grads_b) = results
    return loss_a + loss_b, {name: grads_a[name] + grads_b[name] for name in grads_a}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_two_ranks_has_the_loss_and_gradients_of_sdpa_on_each_document(family: str) -> None:
    loss, grads = _on_two_ranks(family)
    expected_loss, expected = _reference(family)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (grads[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_a_batch_is_planned_for_layers_that_differ_in_their_heads() -> None:
    family = FAMILIES["gemma4 with full layers of other heads"]
    model, documents = family.model("distca"), [{"input_ids": tokens.tolist()} for tokens in _tokens()]
    batch = transformers.DataCollatorWithFlattening()(documents)
    with distca.init(max_tokens=sum(LENGTHS), heads=hf.heads_of(model.config, torch.float32)) as context:
        assert context.layer_heads == family.heads
        model(**hf.plan_inputs(batch, model), use_cache=False).loss.backward()
        assert context.step == 4
    with (
        distca.init(max_tokens=sum(LENGTHS), heads=family.heads[None]),
        pytest.raises(
            distca.InvalidArgumentError, match=r"differ in their heads, .* heads=distca.*heads_of\(model.config"
        ),
    ):
        hf.plan_inputs(batch, model)
    grads, targets = _reference("gemma4 with full layers of other heads")[1], sum(LENGTHS) - len(LENGTHS)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad * targets, grads[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_without_a_plan_attention_is_the_models_own_with_its_softcap_and_sinks(family: str) -> None:
    tokens = _tokens()[0][None]
    with torch.no_grad():
        ours, eager = (
            FAMILIES[family].model(attention).eval()(tokens, use_cache=False).logits
            for attention in ("distca", "eager")
        )
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_a_layer_that_fully_shard_has_wrapped_finds_its_models_eager_attention() -> None:
    """fully_shard gives a module a class of its own, from a file of its own. Here it has that class alone."""
    tokens, model = _tokens()[0][None], FAMILIES["gemma2"].model("distca").eval()
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        for layer in model.model.layers:
            kind = type(layer.self_attn)
            layer.self_attn.__class__ = type("FSDP" + kind.__name__, (kind,), {})
        assert torch.equal(model(tokens, use_cache=False).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_windows_of_a_family_are_those_its_layers_call_with(family: str) -> None:
    config = FAMILIES[family].model("distca").config
    windows = {w if w != 90 else None for w in hf.windows_of(config)}
    heads = hf.heads_of(config, torch.float32)
    assert (heads if isinstance(heads, dict) else dict.fromkeys(windows, heads)) == FAMILIES[family].heads


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ("MiMoV2FlashConfig", {}, {None: distca.Heads(64, 4, 192, 128), 129: distca.Heads(64, 8, 192, 128)}),
        ("Gemma4UnifiedTextConfig", {}, {None: distca.Heads(8, 4, 512), 1024: distca.Heads(8, 4, 256)}),
        (
            "Step3p7TextConfig",
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 512}
            | {"num_sliding_attention_heads": 96, "num_hidden_layers": 4},
            {None: distca.Heads(64, 8, 128), 512: distca.Heads(96, 8, 128)},
        ),
        (
            "LagunaConfig",
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64}
            | {"num_attention_heads_per_layer": [48, 64] * 2, "num_hidden_layers": 4},
            {None: distca.Heads(48, 8, 128), 64: distca.Heads(64, 8, 128)},
        ),
    ],
)
def test_layers_of_another_window_may_have_other_heads(
    config: str, options: dict[str, Any], expected: dict[int | None, distca.Heads]
) -> None:
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    found = getattr(transformers, config)(**options)
    assert hf.heads_of(found, torch.float32) == expected
    assert set(hf.windows_of(found)) == set(expected)


def test_older_versions_say_the_heads_of_full_layers_in_fields_of_their_own() -> None:
    """As Gemma 4's configuration before transformers 5.15."""
    fields = {"model_type": "gemma4_text", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    fields |= {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = SimpleNamespace(**fields, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    config.get_text_config = lambda: config
    assert hf.heads_of(config, torch.float32) == {64: distca.Heads(8, 4, 256), None: distca.Heads(8, 1, 512)}
    config.layer_types = ["linear_attention", "full_attention"]
    assert hf.heads_of(config, torch.float32) == distca.Heads(8, 1, 512), "a layer without attention has none"
    config.layer_types = ["sliding_attention", "full_attention"]
    config.attention_k_eq_v = False
    assert hf.heads_of(config, torch.float32)[None] == distca.Heads(8, 4, 512)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            "LagunaConfig",
            {"num_attention_heads_per_layer": [48, 64], "num_hidden_layers": 2},
            r"layers of the window None differ in their heads \(layer 0: q=48, .*; layer 1: q=64, .* share a plan",
        ),
        ("MambaConfig", {}, r"the configuration \(mamba\) has no num_attention_heads"),
    ],
)
def test_heads_that_differ_between_layers_of_one_window_are_refused(
    config: str, options: dict[str, Any], message: str
) -> None:
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    with pytest.raises(distca.InvalidArgumentError, match=message):
        hf.heads_of(getattr(transformers, config)(**options), torch.float32)


# ---- what is not supported

REFUSED = {
    "llama4": (
        Family("Llama4TextConfig", {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48}),
        r"no plan for a window of Chunk\(rows=16\); there are plans for None, 12",
    ),
    "bloom": (Family("BloomConfig"), "BloomForCausalLM takes no position_ids: it counts the rows of the tensor"),
    "gpt_neox_japanese": (
        Family("GPTNeoXJapaneseConfig", MHA),
        r"works on the attention mask itself \(adds it to its attention scores\), and so bypasses",
    ),
    "xglm": (
        Family("XGLMConfig", {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2}),
        r"works on the attention mask itself \(asks for .size\)",
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of kernels
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_needs_more_is_refused_with_what_it_needs(family: str) -> None:
    made, message = REFUSED[family]
    model = made.model("distca")
    plans = distca.plans(distca.Layout.from_documents([LENGTHS]), GQA, windows=[None, WINDOW])
    tokens = torch.cat(_tokens())[None]
    with loopback_group(list(plans.values())) as [context], pytest.raises(distca.InvalidArgumentError, match=message):
        model(
            tokens,
            position_ids=plans.layout.position_ids(0)[None],
            use_cache=False,
            plan=plans,
            distca_context=context,
        )


def test_a_model_with_a_table_of_its_own_is_refused_when_it_is_made() -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, attn_implementation="distca"
    )
    with pytest.raises(distca.InvalidArgumentError, match=r"from a table of its own \(FALCON_ATTENTION_CLASSES\)"):
        transformers.FalconForCausalLM(config)
