"""Tiny models of every kind of family in transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

import distca

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


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


GQA = distca.Heads(4, 2, 16)


MHA = {"num_key_value_heads": None, "head_dim": None}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family: its configuration class, its own options, and the head shapes of its layers by their window."""

    config: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    heads: dict[int | None, distca.Heads] = dataclasses.field(default_factory=lambda: {None: GQA})
    reference: str = "sdpa"

    def model(self, attention: str) -> torch.nn.Module:
        torch.manual_seed(5)
        options = SIZES | self.options | {"attn_implementation": attention}
        config = getattr(transformers, self.config)(**options)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        with torch.no_grad():  # gain 1.5: with transformers' std of 0.02 a wrong position changes a loss by 1e-6 only
            for name, weight in model.named_parameters():
                if weight.dim() >= 2 and "embed" not in name:
                    weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
        return model


FAMILIES = {
    "llama": Family("LlamaConfig"),
    "qwen2 with windows in the upper layer": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {None: GQA, WINDOW: GQA},
    ),
    "qwen2_moe": Family("Qwen2MoeConfig", {"num_experts": 4, "shared_expert_intermediate_size": 24} | EXPERTS),
    "qwen3": Family("Qwen3Config"),
    "qwen3_moe": Family("Qwen3MoeConfig", {"num_experts": 4} | EXPERTS),
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW}, {WINDOW: GQA}),
    "mistral with a window longer than any document": Family("MistralConfig", {"sliding_window": 90}),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}, {WINDOW: GQA}),
    "gemma2": Family("Gemma2Config", ALTERNATING | {"attn_logit_softcapping": 2.0}, {None: GQA, WINDOW: GQA}, "eager"),
    "gpt_oss": Family(
        "GptOssConfig",
        ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},
        {None: GQA, WINDOW: GQA},
        "eager",
    ),
    "gemma3": Family("Gemma3TextConfig", ALTERNATING | {"query_pre_attn_scalar": 9}, {None: GQA, WINDOW: GQA}),
    "gemma4 with full layers of other heads": Family(
        "Gemma4TextConfig",
        ALTERNATING
        | {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        {None: distca.Heads(4, 1, 24), WINDOW: GQA},
    ),
    "olmo2": Family("Olmo2Config"),
    "phi3": Family("Phi3Config"),
    "granite": Family("GraniteConfig"),
    "glm4": Family("Glm4Config"),
    "smollm3": Family("SmolLM3Config"),
    "cohere2": Family("Cohere2Config", ALTERNATING, {None: GQA, WINDOW: GQA}),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 40}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | EXPERTS,
        {None: distca.Heads(4, 4, 24, 40)},
    ),
    "jetmoe": Family(
        "JetMoeConfig",
        {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        {None: distca.Heads(4, 4, 16)},
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeConfig",
        {"num_key_value_heads": None, "head_dim": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        {None: distca.Heads(4, 1, 8)},
    ),
    "gpt_neox": Family("GPTNeoXConfig", MHA, {None: distca.Heads(4, 4, 8)}),
    "gpt2": Family(
        "GPT2Config", MHA | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, {None: distca.Heads(4, 4, 8)}
    ),
}
