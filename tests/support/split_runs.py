"""Runs of `distca train` whose processes share the model, and the same runs on one rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distca.apps.train.config import TrainConfig
from distca.apps.train.trainer import train
from support.ranks import launch
from support.train_runs import metrics_in, one_rank, without_pictures

TOKENS = 128
"""Tokens of a micro-batch, on all data ranks together. There are documents in the data that are longer."""

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # with transformers' 0.02 a wrong position changes a loss by 1e-6 only
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with five layers": {"model_type": "llama", "num_hidden_layers": 5},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 12},
    "gemma2": _WINDOWS | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 9},
    "mixtral": {"sliding_window": 12} | _EXPERTS,
    "gpt_oss": _WINDOWS | _EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
"""Options of each model that is trained. Its name is the type in transformers, unless they say one."""


@dataclass(frozen=True)
class Way:
    """How many ranks share a run, and how.

    Attributes:
        ranks: processes.
        split: options that say how they share it.
        model: one of `MODELS`.
        options: options that a run on one rank has as well.
        exports: whether the model is exported, to a folder of the run's name and ", exported".
    """

    ranks: int
    split: dict[str, Any]
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    exports: bool = False

    def config(self, folder: Path) -> TrainConfig:
        """The configuration; `folder` has the data, and models by their names."""
        data_ranks = self.ranks // (self.split.get("pipeline", 1) * self.split.get("tensor", 1))
        return TrainConfig(
            **{
                "ranks": self.ranks,
                "steps": 3,
                "tokens_per_rank": TOKENS // data_ranks,
                "accumulate": 4,
                "clip_norm": 3.5,
                "weight_decay": 0.1,
                "lr": 3e-3,
                "warmup_steps": 1,
                "data": folder / "data",
                "model": str(folder / self.model),
            }
            | self.options
            | self.split
        )

    @property
    def alone(self) -> Way:
        """The same run on one rank."""
        return replace(self, ranks=1, split={})

    @property
    def name_alone(self) -> str:
        return f"{self.model} on one rank, {json.dumps(self.options)}"


def write_texts(folder: Path) -> None:
    """Documents of very different lengths, in the folder `data` of this one."""
    (folder / "data").mkdir()
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (20 if number % 6 == 0 else 1 + number // 2)
        (folder / "data" / f"{number:02}.txt").write_text(text)


def write_files(folder: Path, models: Sequence[str]) -> None:
    """Documents, and the configuration of each model."""
    write_texts(folder)
    for model in models:
        (folder / model).mkdir()
        config = {"model_type": model, **SHAPE, **MODELS[model]}
        (folder / model / "config.json").write_text(json.dumps(config))


def run_all(ways: dict[str, Way], files: Path, runs: Path) -> None:
    """Trains in every way, and on one rank, each into a folder of its name: what `name_alone` is for one rank."""
    for ranks in sorted({way.ranks for way in ways.values()}):
        launch(_train, {name: way for name, way in ways.items() if way.ranks == ranks}, files, runs, ranks=ranks)
    with one_rank():
        alone = {way.name_alone: way.alone for way in sorted(ways.values(), key=lambda way: way.exports)}
        _train(alone, files, runs)


@without_pictures()
def _train(ways: dict[str, Way], files: Path, runs: Path) -> None:
    for name, way in ways.items():
        if dist.get_rank() == 0:
            (runs / name).mkdir()
        train(replace(way.config(files), export=runs / f"{name}, exported" if way.exports else None), runs / name)


def figures_in(run_dir: Path) -> dict[str, list[float]]:
    """Losses, gradient norms and evaluations of a run."""
    metrics = metrics_in(run_dir)
    return {name: [step[name] for step in metrics if name in step] for name in ("loss", "grad_norm", "eval_loss")}


def worst_difference(run_dir: Path, other: Path) -> float:
    """The largest relative difference of the figures of two runs."""
    ours, theirs = figures_in(run_dir), figures_in(other)
    pairs = [pair for name in ours for pair in zip(ours[name], theirs[name], strict=True)]
    assert pairs
    return max(abs(a - b) / abs(b) for a, b in pairs)
