"""Model families of transformers with attn_implementation="distca": the loss and gradients of SDPA on each document."""

import pytest
import torch
import torch.nn.functional as F
import transformers

import distca
import distca.integrations.hf
from support import loopback_group, on_all_ranks

VOCABULARY = 61
LENGTHS = [90, 1, 33, 7]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 12
# Family: (configuration class, what is particular about it, the windows of its layers).
FAMILIES = {
    "llama": ("LlamaConfig", {}, [None]),
    "qwen2 with windows in the upper layer": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        [None, WINDOW],
    ),
    "qwen3": ("Qwen3Config", {}, [None]),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}, [WINDOW]),
    "mistral with a window longer than any document": ("MistralConfig", {"sliding_window": 90}, [None]),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 9},
        [None, WINDOW],
    ),
    "olmo2": ("Olmo2Config", {}, [None]),
    "phi3": ("Phi3Config", {}, [None]),
}


def _model(config_class: str, options: dict, attention: str) -> torch.nn.Module:
    torch.manual_seed(5)
    config = getattr(transformers, config_class)(**SIZES, **options, attn_implementation=attention)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def _targets() -> list[torch.Tensor]:
    return [torch.cat([tokens[1:], torch.tensor([-100])]) for tokens in _tokens()]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def _reference(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    config_class, options, _ = FAMILIES[family]
    model = _model(config_class, options, "sdpa")
    total = 0.0
    for tokens, targets in zip(_tokens(), _targets(), strict=True):
        loss = _loss(model(tokens[None], use_cache=False).logits[0], targets)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def _on_two_ranks(family: str) -> tuple[float, dict[str, torch.Tensor]]:
    config_class, options, windows = FAMILIES[family]
    heads = distca.Heads(q=4, kv=2, dim=16)
    layout = distca.Layout.packed(LENGTHS, ranks=2, tokens_per_rank=70)
    plans = distca.plans(layout, heads, windows=windows, tolerance=0.02)
    models = [_model(config_class, options, "distca") for _ in range(2)]

    def run(rank: int, context: distca.Context) -> tuple[float, dict[str, torch.Tensor]]:
        model, mine, segments = models[rank], plans.for_rank(rank), layout.segments(rank)
        tokens = torch.cat([_tokens()[d][begin:end] for d, begin, end in segments])
        targets = torch.cat([_targets()[d][begin:end] for d, begin, end in segments])
        logits = model(
            tokens[None],
            position_ids=layout.position_ids(rank)[None],
            use_cache=False,
            plan=mine if len(windows) > 1 else mine[windows[0]],
            distca_context=context,
        ).logits
        loss = _loss(logits[0], targets)
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}

    with loopback_group(list(plans.values())) as contexts:
        results = on_all_ranks(contexts, run)
    (loss_a, grads_a), (loss_b, grads_b) = results
    return loss_a + loss_b, {name: grads_a[name] + grads_b[name] for name in grads_a}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_on_two_ranks_has_the_loss_and_gradients_of_sdpa_on_each_document(family: str) -> None:
    loss, grads = _on_two_ranks(family)
    expected_loss, expected = _reference(family)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (grads[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
