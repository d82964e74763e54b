"""Runs whose processes share the model take the steps of the same run on one rank: the forms and families of models
that `test_train_split.py` leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.once import made_once
from support.split_runs import MODELS, Way, figures_in, run_all, worst_difference, write_files
from support.thinning import thinned

BOTH: dict[str, Any] = {"pipeline": 2, "tensor": 2}
STAGES: dict[str, Any] = {"pipeline": 2}
TENSOR: dict[str, Any] = {"tensor": 2}
SHARDS: dict[str, Any] = {"fsdp": True}
RECOMPUTED: dict[str, Any] = {"checkpoint_activations": True}
UNEVEN = {"eval_fraction": 0.2, "eval_every": 2, "eval_steps": 2}
FAMILIES = [model for model in MODELS if model not in ("llama", "llama with five layers", "lfm2")]

EXACT = {
    "three stages, dealt by cost": Way(3, {"pipeline": 3}, "llama with five layers"),
    "chunks of tensor ranks, in ping-pong": Way(4, {**BOTH, "chunks": 2, "ping_pong": True}),
    "chunks of data ranks, recomputed, tied": Way(4, {**STAGES, **RECOMPUTED, "chunks": 2}, "qwen3"),
    "chunks and shards, tied": Way(4, {**STAGES, **SHARDS, "chunks": 2}, "qwen3"),
    "shards of tensor ranks, tied": Way(4, {**TENSOR, **SHARDS}, "qwen3"),
    "shards of tensor ranks, evaluated": Way(4, {**TENSOR, **SHARDS}, options=UNEVEN),
    "tensor ranks in ping-pong, recomputed": Way(4, {**TENSOR, **RECOMPUTED, "ping_pong": True}),
    "one micro-batch, not balanced": Way(4, {**BOTH, "balance": "off"}, options={"accumulate": 1}),
    "chunks of data ranks, head-tail": Way(4, {**STAGES, "chunks": 2, "homes": "head-tail", "context": 2}),
    "tensor ranks in ping-pong, head-tail": Way(4, {**TENSOR, "ping_pong": True, "homes": "head-tail", "context": 2}),
    "five micro-batches, compared": Way(4, {**STAGES, "compare": True}, options={"accumulate": 5}),
    # Each form with a model of every kind: windows in all layers or in some, experts, and tied weights.
    **{f"{model}, chunks of tensor ranks": Way(4, {**BOTH, "chunks": 2}, model) for model in FAMILIES},
    "a hybrid in ping-pong": Way(4, {**STAGES, "ping_pong": True}, "lfm2"),
    "a hybrid of shards, recomputed": Way(4, {**STAGES, **SHARDS, **RECOMPUTED}, "lfm2"),
    **{f"{model}, shards in stages": Way(4, {**STAGES, **SHARDS}, model) for model in ("gemma3_text", "mixtral")},
}
ROUNDED = {
    "bfloat16": Way(4, BOTH, options={"dtype": "bfloat16"}),
    "bfloat16, master weights": Way(4, BOTH, options={"dtype": "bfloat16", "master_weights": True}),
}
WAYS = dict(thinned((EXACT | ROUNDED).items()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each run, and of what it is compared with."""

    def make(folder: Path) -> Path:
        write_files(folder, sorted({way.model for way in WAYS.values()}))
        run_all(WAYS, folder, folder)
        return folder

    return made_once(tmp_path_factory, "split_runs_of_other_forms", make)


@pytest.mark.parametrize("name", WAYS)
def test_losses_gradient_norms_and_evaluations_are_those_of_one_rank(name: str, runs: Path) -> None:
    alone = figures_in(runs / WAYS[name].name_alone)
    assert len(alone["loss"]) == len(alone["grad_norm"]) == 3
    worst = worst_difference(runs / name, runs / WAYS[name].name_alone)
    print(f"{name}: {worst:.1e}")
    # bfloat16 has 8 bits of mantissa: each of a few roundings in a row may be 2^-9 of the number.
    assert worst < (1e-5 if name in EXACT else 3e-2)
