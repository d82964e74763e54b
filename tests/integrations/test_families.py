"""Models of transformers with documents cut between two ranks: one of each kind. `make families` has them all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from families import padded, tiny
from families.cases import CASES, is_as_expected
from families.reference import Case, documents, logits_of, mistakes, reference
from families.verdict import judge

import distca
from distca.integrations import hf
from distca.simulator.reading import read_model

SAMPLE = {
    "full attention, RoPE": "llama",
    "positions learned": "gpt2",
    "positions from 1": "roberta",
    "one key head": "gpt_bigcode",
    "query heads with keys of their own": "jetmoe",
    "windows": "mistral",
    "layers with windows between others": "cohere2",
    "layers that differ in their heads": "mimo_v2_flash",
    "wide heads": "gemma4_text, heads as released",
    "keys of earlier layers": "gemma4_unified_text, shared keys",
    "two calls of attention a layer": "diffllama",
    "layers that run several times": "hrm_text",
    "softcap": "gemma2",
    "sinks, experts": "gpt_oss",
    "latent attention": "deepseek_v2",
    "experts": "qwen3_moe",
    "a text model in a larger one": "gemma3",
    "frequencies of the longest position": "phi3, longrope",
    "frequencies that grow with it": "llama, dynamic RoPE",
    "keywords that reach no layer": "stablelm",
    "recurrent layers between others": "qwen3_next, whole documents",
    "recurrent layers and a document that is cut": "qwen3_next",
    "recurrent layers alone": "mamba",
    "recurrence beside attention": "falcon_h1, whole documents",
    "convolutions": "lfm2_moe, whole documents",
    "chunks, and queries scaled by the row": "llama4_text, chunks and temperature",
    "keys chosen by an index": "deepseek_v32",
    "positions counted by the row": "bart",
    "attention of its own, with the mask": "doge",
    "attention of its own, without the mask": "openai-gpt",
    "attention from a table of its own": "falcon",
    "experts drawn at random": "phimoe",
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of kernels
@pytest.mark.parametrize("kind", SAMPLE)
def test_a_model_of_each_kind_is_exact_or_refused_with_the_reason(kind: str) -> None:
    name = SAMPLE[kind]
    if name not in CASES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    verdict = judge(CASES[name])
    assert is_as_expected(name, verdict), verdict


@pytest.mark.parametrize("share_prompts", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("name", ["bert, masked", "gemma3", "gpt2", "lfm2", "llama4_text", "phi3, longrope", "roberta"])
def test_a_model_of_each_kind_takes_padded_batches(name: str, share_prompts: bool) -> None:
    found = padded.found(CASES[name], share_prompts)
    assert found == "exact" if padded.is_exact(name, share_prompts) else found.startswith("refused: ")


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "deepseek_v2", "phi3, longrope"])
def test_mistakes_would_change_the_logits_a_thousand_times_more_than_is_allowed(name: str) -> None:
    assert min((changes := mistakes(CASES[name])).values()) > 1e-2, changes


OTHERS = {
    "a window of one row more": (Case("mistral"), {"sliding_window": tiny.WINDOW + 1}),
    "no softcap": (Case("gemma2"), {"attn_logit_softcapping": 1e3}),
    "another scale": (Case("granite"), {"attention_multiplier": 0.9}),
    "frequencies of documents that are not long": (CASES["phi3, longrope"], CASES["phi3"].options),
}


@pytest.mark.parametrize("what", OTHERS)
def test_attention_that_differs_a_little_shows_in_loss_and_logits(what: str) -> None:
    case, options = OTHERS[what]
    right, wrong = reference(case), reference(dataclasses.replace(case, options=options))
    assert abs(right.loss - wrong.loss) > 1e-4 * right.loss
    assert (right.logits - wrong.logits).norm() > 1e-2 * right.logits.norm()


def test_sinks_that_are_left_out_show_in_the_logits() -> None:
    model = CASES["gpt_oss"].model("eager")
    right = logits_of(model, documents())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.fill_(-1e4)
    assert (logits_of(model, documents()) - right).norm() > 1e-2 * right.norm()


def test_every_configuration_says_its_heads_and_windows_or_why_it_has_none() -> None:
    for name, case in CASES.items():
        config = tiny.config_of(case.entry, case.options)
        for said in (hf.windows_of, lambda config: hf.heads_of(config, torch.float32)):
            try:
                said(config)
            except distca.InvalidArgumentError as error:
                assert str(error), name


def test_the_simulator_takes_a_models_attention_for_what_it_is_or_refuses_it(tmp_path: Path) -> None:
    path, taken = tmp_path / "config.json", 0
    for name, case in CASES.items():
        config = tiny.config_of(case.entry, case.options)
        path.write_text(config.to_json_string(use_diff=False))
        try:
            model = read_model(path)
        except distca.InvalidArgumentError:
            continue
        taken += 1
        assert hf.windows_of(config) == [None] * model.layers, name
        assert hf.heads_of(config, model.heads.dtype) == model.heads, name
    assert taken > 50
