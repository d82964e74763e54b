"""A case for every model of transformers' table, further cases of some, and the reasons why some are refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from . import tiny
from .reference import Case
from .verdict import Verdict

_LONG = 80  # longer than the rows of a rank, shorter than the longest document
_DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "max_position_embeddings": _LONG,
}
_LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": _LONG}
    | {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
}
_SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": _LONG}
_WINDOWS = {"sliding_window": tiny.WINDOW}
_TYPES = ["sliding_attention", "full_attention"]
_SHARED = {"layer_types": _TYPES * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
_OTHER_HEADS = {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_NO_CHUNKS = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]}

#: Models whose positions begin after the position of the padding token.
_FROM_1 = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
_FROM_1 += tuple(f"{name}, masked" for name in (*_FROM_1, "esm", "ibert", "longformer", "luke"))

_ENTRIES = [entry for entry in tiny.CLASSES if entry not in tiny.NOT_BUILT]

CASES: dict[str, Case] = {
    **{entry: Case(entry, first_position=int(entry in _FROM_1)) for entry in _ENTRIES},
    "mpnet, masked": Case("mpnet, masked", first_position=2),
    # causal models made into such that see both sides, and options of encoders
    "llama, both sides": Case("llama", {"is_causal": False}),
    "mistral, both sides": Case("mistral", {"is_causal": False}),
    "gemma2, both sides": Case("gemma2", {"is_causal": False}),
    "gemma4_text, both sides": Case("gemma4_text", {"use_bidirectional_attention": "all", "sliding_window": 16}),
    "gemma3_text, both sides": Case("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 16}),
    "esm, RoPE": Case("esm, masked", {"position_embedding_type": "rotary"}),
    "esm, scaled by masks": Case("esm, masked", {"position_embedding_type": "rotary", "token_dropout": True}),
    "albert, dropout": Case("albert, masked", {"attention_probs_dropout_prob": 0.1}),
    # RoPE that depends on the longest position of a row, and RoPE that does not
    "internlm3, dynamic RoPE": Case("internlm3", _DYNAMIC),
    "llama, dynamic RoPE": Case("llama", _DYNAMIC),
    "llama, RoPE of Llama 3": Case(
        "llama", {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _SCALED}
    ),
    "llama, YaRN": Case("llama", {"rope_parameters": {"rope_type": "yarn"} | _SCALED}),
    "minicpm3, longrope": Case("minicpm3", _LONGROPE),
    "phi3, longrope": Case("phi3", _LONGROPE | {"original_max_position_embeddings": _LONG}),
    "phi4_multimodal, longrope": Case("phi4_multimodal", _LONGROPE | {"original_max_position_embeddings": _LONG}),
    # options that change what attention is
    "gpt_bigcode, a key head for each": Case("gpt_bigcode", {"multi_query": False}),
    "cohere, norms of all heads": Case("cohere", {"use_qk_norm": True}),
    "glm4_moe, norms of single heads": Case("glm4_moe", {"use_qk_norm": True}),
    "phi, norms of single heads": Case("phi", {"qk_layernorm": True}),
    "granitemoehybrid, attention only": Case(
        "granitemoehybrid", {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    ),
    "llama4_text, no chunks": Case("llama4_text", _NO_CHUNKS | {"attn_temperature_tuning": False}),
    "llama4_text, chunks and temperature": Case(
        "llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 8, "attn_scale": 0.5, "attention_chunk_size": 24}
    ),
    "qwen2, windows in the upper layer": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": tiny.WINDOW, "max_window_layers": 1}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma4_text, full layers of other heads": Case("gemma4_text", _OTHER_HEADS),
    "gemma4_text, heads as released": Case("gemma4_text", _OTHER_HEADS | {"global_head_dim": 512, "head_dim": 256}),
    "laguna, other heads in layers with a window": Case(
        "laguna", _WINDOWS | {"layer_types": _TYPES, "num_attention_heads_per_layer": [4, 6]}
    ),
    "laguna, heads of each layer": Case("laguna", {"num_attention_heads_per_layer": [4, 6]}),
    "phi3, windows": Case("phi3", _WINDOWS),
    "starcoder2, windows": Case("starcoder2", _WINDOWS),
    "qwen2_moe, windows": Case("qwen2_moe", _WINDOWS | {"use_sliding_window": True, "layer_types": _TYPES}),
    "gemma3n_text, shared keys": Case("gemma3n_text", _SHARED),
    "gemma4_text, shared keys": Case(
        "gemma4_text", _SHARED | {"global_head_dim": 16, "hidden_size_per_layer_input": 32}
    ),
    "gemma4_unified_text, shared keys": Case("gemma4_unified_text", _SHARED | {"global_head_dim": 16}),
    "minimax_m3_vl_text, chosen keys": Case(
        "minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8}
    ),
    "mllama, a layer for images": Case("mllama", {"text_config": {"cross_attention_layers": [1]}}),
    # what a caller can change in a configuration
    "llama, dropout": Case("llama", {"attention_dropout": 0.1}),
    "llama4_text, no chunks, temperature": Case(
        "llama4_text", _NO_CHUNKS | {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5}
    ),
    "mixtral, jitter": Case("mixtral", {"router_jitter_noise": 0.1}),
    "roberta, positions from 0": Case("roberta"),
}

#: Models with recurrent layers and attention, by the name of their case; some need options to have a layer of each.
RECURRENT: dict[str, Case] = {
    **{
        entry: Case(entry)
        for entry in (
            *("bailing_hybrid", "falcon_h1", "inkling2_loop_text", "inkling2_text", "inkling_text", "kimi_linear"),
            *("lara_mini", "lfm2_moe", "lfm3", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2", "zaya"),
        )
    },
    "bamba, attention": Case("bamba", {"attn_layer_indices": [1]}),
    "granitemoehybrid, both": Case("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    "jamba, attention": Case("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "lfm2, convolutions": Case("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "recurrent_gemma, attention": Case("recurrent_gemma", {"block_types": ["recurrent", "attention"]}),
}
CASES |= {name: dataclasses.replace(case, recurrent=True) for name, case in RECURRENT.items()}
CASES = {name: case for name, case in CASES.items() if case.entry in tiny.CLASSES}  # older versions lack some

#: What the errors of refused cases say, and the cases that get each error.
REFUSED: dict[str, tuple[str, ...]] = {
    "layers of the window None differ in their heads": ("laguna, heads of each layer",),
    "none of the model's layers has attention": ("bamba", "granitemoehybrid", "jamba", "recurrent_gemma"),
    "a position bias is not supported yet": ("inkling2_loop_text", "inkling2_text", "inkling_text"),
    r"is of type (indexed_attention|heavily_compressed_attention|minimax_m3_sparse), .* choose their keys themselves": (
        *(
            "qwen4_exp",
            "qwen4_exp_text",
            "axk2",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note",
            "dots3_note_text",
            "glm_moe_dsa",
            "hy_v4",
        ),
        "minimax_m3_vl_text, chosen keys",
    ),
    "the model's attention has a convolution": ("convbert, masked",),
    "the model attends among rows that it has hashed alike": ("reformer", "reformer, masked"),
    r"scales embeddings by how many rows are masked \(token_dropout\), over the borders of documents": (
        "esm, scaled by masks",
    ),
    r"takes the embeddings of a row's neighbours with its own \(trigram_input\), over the borders of documents": (
        "mobilebert, masked",
    ),
    "attention_mask is a ready-made mask": ("layoutlm, masked",),
    r"\(perceiver\) has no num_hidden_layers": ("perceiver, masked",),
    "has no num_hidden_layers: the model groups the bytes of a row into patches": ("blt",),
    "has no num_attention_heads": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm", "fnet, masked"),
    "takes its attention from a table of its own": ("falcon", "git", "gpt_neo", *(["gptj"] if tiny.OLD else [])),
    "bypasses transformers' AttentionInterface": (
        *(
            "big_bird",
            "doge",
            "gpt_neox_japanese",
            "megatron-bert",
            "openai-gpt",
            "rembert",
            "xglm",
            "xlm",
            *(["codegen"] if tiny.OLD else []),
        ),
        *(
            f"{name}, masked"
            for name in ("big_bird", "deberta", "deberta-v2", "flaubert", "ibert", "longformer", "luke")
        ),
        *(f"{name}, masked" for name in ("megatron-bert", "mpnet", "mra", "nystromformer", "rembert", "squeezebert")),
        *(f"{name}, masked" for name in ("tapas", "xlm", "yoso")),
    ),
    "takes no position_ids": (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "cpmant", "marian", "mbart"),
        *("mpt", "musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet"),
        *("roformer", "trocr", "xlnet"),
        *(f"{name}, masked" for name in ("bart", "funnel", "mbart", "mvp", "roformer")),
    ),
    "router draws experts at random": ("phimoe",),
    "the plan was used 1 times: layers were left out": ("mllama, a layer for images",),
    "a mask with a window or chunks of 12, and the layer does not say which": ("qwen2_moe, windows",),
    "attention dropout is 0.1": ("llama, dropout", "albert, dropout"),
    "router_jitter_noise=0.0": ("mixtral, jitter",),
    r"row 0 has position 0, its document has 1 there": ("roberta, positions from 0",),
}

REASONS = {name: re.compile(sentence) for sentence, names in REFUSED.items() for name in names}


def expected_kind(name: str) -> str:
    return "refused" if name in REASONS else "exact"


def is_as_expected(name: str, verdict: Verdict) -> bool:
    """Whether the verdict is the one known of the pinned transformers. An older one may use its AttentionInterface in
    fewer models, and say less of them: there any verdict will do, but for a model that is wrong.
    """
    if tiny.OLD:
        return verdict.kind != "fails"
    reason = REASONS.get(name)
    return verdict.kind == expected_kind(name) and (reason is None or reason.search(verdict.sentence) is not None)


#: Models whose configuration refuses dynamic RoPE.
_NOT_DYNAMIC = ("phi3",)


def with_rope(kind: str) -> dict[str, Case]:
    """A case for every exact model with RoPE, in which all its layers have RoPE of the type "dynamic" or "longrope"."""
    cases = {}
    for entry in _ENTRIES:
        config = tiny.config_of(entry, {})
        parameters = getattr(config, "rope_parameters", None)
        if not parameters or config.model_type != entry or config.sub_configs or expected_kind(entry) == "refused":
            continue  # it has no RoPE, or a part has it that is an entry of its own
        if kind == "dynamic" and entry in _NOT_DYNAMIC:
            continue
        rotated = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
        rotated = rotated or config.hidden_size // config.num_attention_heads

        def scaled(of: dict[str, Any] | None, rotated: int = rotated) -> dict[str, Any] | None:
            if of is None:  # these layers have no RoPE
                return None
            part = 1.0 if of["rope_type"] == "proportional" else max(0.5, of.get("partial_rotary_factor", 1.0))
            pairs = int(rotated * part) // 2
            scaled = of | {"rope_type": kind, "partial_rotary_factor": part, "factor": 4.0}
            if kind == "dynamic":
                return scaled
            factors = {"short_factor": [1.0] * pairs, "long_factor": [1.0 + pair for pair in range(pairs)]}
            return scaled | factors | {"original_max_position_embeddings": _LONG}

        of_layers = any(isinstance(value, dict) for value in parameters.values())
        made = {name: scaled(of) for name, of in parameters.items()} if of_layers else scaled(parameters)
        options: dict[str, Any] = {"rope_parameters": made}
        if kind == "dynamic":
            options["max_position_embeddings"] = _LONG
        elif hasattr(config, "original_max_position_embeddings"):
            options["original_max_position_embeddings"] = _LONG
        cases[entry] = Case(entry, options, recurrent=CASES[entry].recurrent)
    return cases
