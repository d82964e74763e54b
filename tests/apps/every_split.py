"""Every causal language model of the installed transformers, trained by four processes that share it: `make families`.

Each takes the steps that it takes on one rank, or is refused by name before anything starts.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

import pytest
from families import tiny
from families.cases import CASES, expected_kind

from distca.apps.common.options import ConfigError
from distca.apps.train.config import TrainConfig
from distca.apps.train.split_run import check_before_start
from distca.apps.train.trainer import train
from support.ranks import launch
from support.split_runs import worst_difference, write_texts
from support.thinning import thinned
from support.train_runs import one_rank, without_pictures

VOCABULARY = 256  # every byte is a token
TOKENS = 128
SPLITS: list[dict[str, int]] = [{"pipeline": 2, "tensor": 2}, {"pipeline": 2}, {"tensor": 2}]
"""How four processes share a model, each with data ranks as well where there are fewer than four."""

NOT_OF_A_RUN = {
    "emu3": "is not a language model of transformers",  # its text model is no entry of transformers' table
    "mllama": "is not a language model of transformers",
    "internlm3, dynamic RoPE": "made for 80 positions",
    "llama, dynamic RoPE": "made for 80 positions",
}
"""Cases that `distca train` refuses on any number of ranks."""

#: Models with recurrent layers that stages share.
RECURRENT = {"minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}

SHARED_BOTH_WAYS = {
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
}
"""Models that pipeline and tensor parallelism must take together."""

EXACT = thinned(
    (name for name, case in CASES.items() if expected_kind(name) == "exact" and not case.sees_both_sides),
    always=SHARED_BOTH_WAYS.__contains__,
)


def _write_model(name: str, folder: Path) -> None:
    case = CASES[name]
    config = tiny.config_of(case.entry, case.options)
    config.vocab_size = VOCABULARY
    if case.recurrent:  # twice the layers, so that stages have attention
        lists = {key: value for key, value in vars(config).items() if isinstance(value, list)}
        for key, value in lists.items():
            if len(value) == config.num_hidden_layers and all(isinstance(kind, str) for kind in value):
                setattr(config, key, value * 2)
        config.num_hidden_layers *= 2
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = VOCABULARY
    config.initializer_range = 0.25  # with transformers' 0.02 a wrong position changes a loss by 1e-6 only
    config.save_pretrained(folder)


def _splits_of(config: TrainConfig) -> list[TrainConfig]:
    """The ways in which four processes may share the model; the others are refused by name."""
    found = []
    for split in SPLITS:
        data_ranks = 4 // (split.get("pipeline", 1) * split.get("tensor", 1))
        changed: dict[str, Any] = {"ranks": 4, "tokens_per_rank": TOKENS // data_ranks, **split}
        try:
            shared = dataclasses.replace(config, **changed)
            check_before_start(shared, VOCABULARY)
        except ConfigError as error:
            assert str(error).startswith(tuple(f"--{option}" for option in (*split, "model"))), error
        else:
            found.append(shared)
            if len(split) == 2:
                break  # the other two are parts of it
    return found


@without_pictures()
def _train(config: TrainConfig, run_dir: Path) -> None:
    run_dir.mkdir(exist_ok=True)
    train(config, run_dir)


#: Other bounds, by name: on an Intel Xeon with AMX this model comes to 2.13e-5.
_BOUNDS = dict.fromkeys(("qwen3_5", "qwen3_5_text"), 2.3e-5)


@pytest.mark.filterwarnings("ignore")  # transformers warns of kernels
@pytest.mark.parametrize("name", EXACT)
def test_a_model_that_processes_share_takes_the_steps_of_one_rank_or_is_refused(name: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    _write_model(name, tmp_path / "model")
    config = TrainConfig(
        ranks=1,
        steps=2,
        tokens_per_rank=TOKENS,
        accumulate=4,
        clip_norm=2.0,
        lr=1e-3,
        warmup_steps=1,
        data=tmp_path / "data",
        model=str(tmp_path / "model"),
    )
    if name in NOT_OF_A_RUN:
        with one_rank(), pytest.raises(ConfigError, match=NOT_OF_A_RUN[name]):
            _train(config, tmp_path / "alone")
        return
    splits = _splits_of(config)
    assert name not in SHARED_BOTH_WAYS or tiny.OLD or (splits[0].pipeline, splits[0].tensor) == (2, 2)
    assert name not in RECURRENT or tiny.OLD or (splits[0].pipeline, splits[0].tensor) == (2, 1)
    if not splits:
        return
    with one_rank():
        _train(config, tmp_path / "alone")
    for number, split in enumerate(splits):
        launch(_train, split, tmp_path / str(number), ranks=4)
        worst = worst_difference(tmp_path / str(number), tmp_path / "alone")
        print(f"{name}, --pipeline {split.pipeline} --tensor {split.tensor}: {worst:.1e}")
        assert worst < _BOUNDS.get(name, 2e-5 if CASES[name].recurrent else 5e-6)  # recurrences carry rounding on
