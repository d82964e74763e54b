"""What users of a trainer expect of `distca train`: clipping, accumulation and the like, each against a plain run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distca.train.config import TrainConfig
from distca.train.trainer import train
from once import made_once
from ranks import launch

SMALL = TrainConfig(steps=3, tokens_per_rank=192, hidden=32, layers=2, lr=0.01)
CLIP = {"clip_norm": 0.25, "weight_decay": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "clip, fsdp": {**CLIP, "fsdp": True},
    "clip, compare": {**CLIP, "compare": True},
    "clip far above": {"clip_norm": 1e6},
    "plain": {},
}


def _train_all(runs: dict[str, TrainConfig], folder: Path) -> None:
    for name, config in runs.items():
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(config, folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        data = folder / "data"
        data.mkdir()
        for number in range(12):
            text = f"line {number} of a text that repeats itself\n" * (40 if number % 6 == 0 else 1 + number)
            (data / f"{number:02}.txt").write_text(text)
        launch(
            _train_all, {name: replace(SMALL, data=data, **options) for name, options in RUNS.items()}, folder, ranks=2
        )
        return folder

    return made_once(tmp_path_factory, "runs_with_features", make)


def _of_steps(run_dir: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_gradients_are_clipped_by_their_norm_over_all_ranks(runs: Path) -> None:
    losses, norms = (_of_steps(runs / "clip", name) for name in ("loss", "grad_norm"))
    assert min(norms) > 2 * CLIP["clip_norm"], "nothing was clipped"
    for name in ("clip, fsdp", "clip, compare"):
        assert _of_steps(runs / name, "loss") == pytest.approx(losses, rel=1e-6)
        assert _of_steps(runs / name, "grad_norm") == pytest.approx(norms, rel=1e-5)
    plain = _of_steps(runs / "plain", "loss")
    assert losses[0] == plain[0] and losses[2] != plain[2]
    assert _of_steps(runs / "clip far above", "loss") == plain
