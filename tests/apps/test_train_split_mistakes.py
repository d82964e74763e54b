"""Mistakes in how processes share a run are refused by name, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from distca.apps.cli import main
from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.models import FAMILIES, SIZES
from support.once import made_once
from support.train_runs import one_rank

FOUR = "--ranks 4 --pipeline 2 --tensor 2"
CHUNKS = "--ranks 2 --pipeline 2 --chunks 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 3 --pipeline 2", "--ranks is 3, must be a multiple of --pipeline 2 times --tensor 1"),
        ("--ranks 6 --pipeline 2 --tensor 2", "--ranks is 6, must be a multiple of --pipeline 2 times --tensor 2"),
        ("--pipeline 0", "--pipeline is 0, must be at least 1"),
        ("--tensor 0", "--tensor is 0, must be at least 1"),
        ("--chunks 2", "--chunks is 2, must be left out without --pipeline"),
        ("--layers-per-stage 2,2", "--layers-per-stage is 2,2, must be left out without --pipeline"),
        ("--pipeline 2 --layers-per-stage 2", "--layers-per-stage is 2, must be 2 positive numbers, such as 2,2"),
        ("--pipeline 2 --layers-per-stage 2,0", "--layers-per-stage is 2,0, must be 2 positive numbers"),
        ("--pipeline 2 --layers-per-stage 1,x", "--layers-per-stage is 1,x, must be 2 positive numbers"),
        ("--pipeline 2 --layers 4 --layers-per-stage 2,3", "--layers-per-stage is 2,3, 5 layers, must be the"),
        (CHUNKS + " --layers 4 --layers-per-stage 2,2", "2,2, 4 layers times --chunks 2, must be the model's 4"),
        ("--ranks 4 --pipeline 4", "--pipeline is 4: 4 chunks of layers, but the model has 2 layers"),
        (CHUNKS, "--pipeline is 2 times --chunks 2: 4 chunks of layers, but the model has 2 layers"),
        (CHUNKS + " --layers 5", "--chunks is 2, must divide the model's 5 layers"),
        (CHUNKS + " --layers 4 --micro-batches 3", "--chunks is 2, must be 1, or --micro-batches (3) a multiple of"),
        ("--ranks 4 --tensor 4", "--tensor is 4, must divide the model's 2 key/value heads"),
        ("--ranks 3 --tensor 3", "--tensor is 3, must divide the model's 4 query heads"),
        ("--pipeline 2 --compile", "--compile is True, must be left out with --pipeline"),
        ("--tensor 2 --compile", "--compile is True, must be left out with --tensor"),
        ("--pipeline 2 --retain-bytes 64", "--retain-bytes is 64, must be 0 with --pipeline"),
        ("--pipeline 2 --fsdp --ping-pong", "--ping-pong is True, must be left out with --pipeline and --fsdp"),
        (FOUR + " --model gpt2", "--pipeline: GPT2LMHeadModel cannot be cut into stages of an embedding, layers, a "
         "norm and a head: h, wpe, wte"),
        (FOUR + " --model granite", "--pipeline: GraniteForCausalLM cannot be cut into stages: it changes its input "
         "before the first layer"),
        (FOUR + " --model deepseek_v3", "--tensor is 2, but transformers has no tensor-parallel plan for the"),
        (FOUR + " --model olmoe", "--tensor is 2, but transformers has no tensor-parallel plan"),
        ("--tensor 2 --model gpt2", "--tensor: GPT2LMHeadModel has no list of 2 layers below an embedding"),
        ("--pipeline 2 --model gemma4", "layers differ in their heads"),
        ("--tensor 2 --model gemma4", "layers differ in their heads"),
        ("--pipeline 2 --model diffllama", "DiffLlamaForCausalLM calls attention 4 times in 2 layers, must be once in "
         "each"),
        ("--pipeline 2 --model qwen3_next", "--layers-per-stage is 1,1, by which stage 0 has layers 0 to 0: each of "
         "its chunks must have as many layers with attention, at least one; these are [1]"),
        ("--tensor 2 --model qwen3_next", "--tensor is 2, but layers.0.linear_attn (Qwen3NextGatedDeltaNet) carries a "
         "state from row to row"),
        ("--pipeline 2 --model jetmoe", "layer 0 of JetMoeForCausalLM has no attention by the name self_attn"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_by_the_name_of_its_option(
    options: str, message: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = options.split()
    if "--model" in arguments:
        _write_model(arguments[-1], tmp_path)
        arguments[-1] = str(tmp_path / arguments[-1])
    runs = tmp_path / "runs"
    assert main(["train", "--data", str(texts), "--runs-dir", str(runs), *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("distca train: error: ") and "Traceback" not in err
    assert not runs.exists() and not out


_OTHERS = {
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "diffllama": ("DiffLlamaConfig", {}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma4": (None, "gemma4 with full layers of other heads"),
}


def _write_model(name: str, folder: Path) -> None:
    kind, options = _OTHERS.get(name, (None, name))
    if isinstance(options, str):
        family = FAMILIES[options]
        kind, options = family.config, family.options
    getattr(transformers, kind)(**(SIZES | options | {"vocab_size": 256})).save_pretrained(folder / name)


# ---- resumed runs


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with four micro-batches of 128 tokens."""

    def make(folder: Path) -> Path:
        one = TrainConfig(ranks=1, steps=1, tokens_per_rank=128, hidden=32, layers=4, accumulate=4, data=texts)
        with one_rank():
            train(one, folder)
        return folder

    return made_once(tmp_path_factory, "run_to_be_split", make)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 4, "pipeline": 2}, "2 data ranks times --tokens-per-rank 128 are 256 tokens a step, must be the "
         "run's 128; with --ranks 4 that is --tokens-per-rank 64"),
        ({"ranks": 6, "pipeline": 2}, "3 data ranks times --tokens-per-rank 128 are 384 tokens a step, must be the "
         "run's 128"),
        ({"ranks": 3, "pipeline": 2}, "--ranks is 3, must be a multiple of --pipeline 2"),
        ({"ranks": 2, "pipeline": 2, "accumulate": 2}, "--accumulate is 2, the run RUN has 4"),
        ({"ranks": 3, "pipeline": 3, "chunks": 2}, "--chunks is 2, must be 1, or --micro-batches (4) a multiple of"),
        ({"ranks": 2, "pipeline": 2, "retain_bytes": 5}, "--retain-bytes is 5, must be 0 with --pipeline"),
    ],
)  # fmt: skip
def test_a_resumed_run_is_not_shared_in_a_way_that_does_not_fit_it(given: dict, message: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message.replace("RUN", str(run)))):
        resumed_config(run, {"steps": 2, **given})


def test_a_resumed_run_keeps_its_micro_batches_and_deals_its_layers_anew(run: Path, tmp_path: Path) -> None:
    split = shutil.copytree(run, tmp_path / "run")
    before = resumed_config(run, {"steps": 2})
    whole = replace(before, accumulate=None)
    dealt = replace(whole, ranks=2, pipeline=2, layers_per_stage="1,1", chunks=2)
    for saved in (whole, dealt):
        (split / "config.json").write_text(json.dumps(saved.as_json()))
        assert resumed_config(split, {}).micro_batches == saved.micro_batches == (1 if saved is whole else 4)
        for given in ({"ranks": 1, "pipeline": 1}, {"ranks": 4, "pipeline": 4}, {"ranks": 2, "pipeline": 2}):
            found = resumed_config(split, given)
            assert found.micro_batches == saved.micro_batches
            kept = saved is dealt and given["pipeline"] == 2
            assert (found.layers_per_stage, found.chunks) == (("1,1", 2) if kept else (None, 1))
    assert resumed_config(split, {"chunks": 1}).layers_per_stage is None
    assert resumed_config(split, {"chunks": 4}).layers_per_stage is None
