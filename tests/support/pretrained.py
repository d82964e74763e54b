"""Runs of `pretrain_llama.py` in processes of a test."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distca.apps.pretrain.options import parse
from support.process_groups import leave_all_groups

#: Three steps of the tiny model. A step has four micro-batches' worth of slots on one data rank.
COMMON = {"STEPS": "3", "TOKENS_PER_RANK": "128", "MAX_DOCUMENT": "100", "MICRO_BATCHES": "4", "LAYERS": "4"}

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def folder_of_runs(factory: pytest.TempPathFactory) -> Path:
    """A folder with texts of lengths from 5 to 400, and with the shape of a Qwen3."""
    folder = factory.mktemp("pretrained")
    (folder / "texts").mkdir()
    draw = random.Random(1)
    for number in range(60):
        text = "".join(draw.choice("abcd efgh\n") for _ in range(int(5 * 80 ** draw.random())))
        (folder / "texts" / f"{number}.txt").write_text(text)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return folder


def variables_of(folder: Path, changes: dict[str, str]) -> dict[str, str]:
    """The variables of a run on the texts of this folder."""
    model = {"MODEL": str(folder / "config.json")} if changes.get("MODEL") == "qwen3" else {}
    return {"DATA": str(folder / "texts"), "DOC_SCALE": "1", **changes, **model}


def runs_of_both(folder: Path, cases: dict[str, dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    """For each case a run with distca, and one with Megatron's schedule and attention."""
    return [
        (f"{name}, {attention}", variables_of(folder, changes | {"ATTENTION": attention} | without))
        for name, changes in cases.items()
        for attention, without in (("distca", {}), ("megatron", {"PING_PONG": ""}))
    ]


def check_both(folder: Path, name: str, changes: dict[str, str]) -> None:
    """Checks that the two runs of a case have the same losses and norms, and that the model learns."""
    ours, theirs = (log_of(folder / f"{name}, {attention}") for attention in ("distca", "megatron"))
    assert len(ours) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        due = mine["step"] > (1 if "EVAL_EVERY" in changes else 2)
        assert ("eval_loss" in mine) == (due and "EVAL_FRACTION" in changes)
        if "eval_loss" in mine:
            assert mine["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    assert ours[0]["loss"] == pytest.approx(5.5, abs=1.0) and ours[2]["loss"] < ours[0]["loss"]
    assert all(step["imbalance_after"] < 1.2 for step in ours) and "imbalance_after" not in theirs[0]


def run(folder: Path, name: str, **variables: str) -> None:
    """A run of the tiny model in this process group.

    With the variable FORGOTTEN the run of the same name before it goes on without its checkpoint of that step.
    """
    from distca.apps.pretrain.train import train

    forgotten = variables.pop("FORGOTTEN", None)
    options = parse([], COMMON | variables).resolved(cuda=False, world_size=dist.get_world_size())
    run_dir = folder / name
    if dist.get_rank() == 0:
        run_dir.mkdir(exist_ok=True)
        if forgotten is not None:
            (run_dir / f"step-{forgotten}" / "run.json").unlink()
    dist.barrier()
    try:
        train(options, run_dir)
    except Exception as error:  # the other ranks may wait for this one; `launch` ends them
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
    assert not multiprocessing.active_children(), "they would outlive this process if it were killed"
    dist.barrier()
    leave_all_groups()
    if dist.get_rank() == 0:  # the next run of this name goes on in this folder, and this log is kept
        number = len(list(folder.glob(f"{name} [0-9]")))
        shutil.copytree(run_dir, folder / f"{name} {number}", ignore=lambda *_: ["tensorboard"])


def run_all(folder: Path, cache: Path, runs: list[tuple[str, dict[str, str]]]) -> None:
    """Runs one after the other."""
    os.environ["DISTCA_CACHE"] = str(cache)
    for name, variables in runs:
        run(folder, name, **variables)


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that a run has logged."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
