"""Features that users of a trainer expect, such as clipping and accumulation, each compared with a plain run."""

import collections
import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

from distca.apps.cli import main
from distca.apps.common.corpus import Corpus
from distca.apps.common.options import ConfigError
from distca.apps.common.sources import DataError
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.model import build_model
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.once import made_once
from support.ranks import launch
from support.train_runs import contents_of, metrics_in, one_rank, without_pictures

SMALL = TrainConfig(steps=3, tokens_per_rank=192, hidden=32, layers=2, lr=0.01)
CLIP = {"clip_norm": 0.25, "weight_decay": 0.1}
ACCUMULATE = {"accumulate": 3, "tokens_per_rank": 96, "clip_norm": 0.25, "checkpoint_every": 1, "keep_checkpoints": 3}
EVALUATE = {"eval_data": Path("other"), "eval_every": 2, "eval_steps": 2}
MASTER = {"dtype": "bfloat16", "master_weights": True}
CHECKPOINT = {"checkpoint_activations": True}
RUNS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "clip, fsdp": {**CLIP, "fsdp": True},
    "clip, compare": {**CLIP, "compare": True},
    "clip far above": {"clip_norm": 1e6},
    "plain": {},
    "evaluate": EVALUATE,
    "evaluate, fsdp, ping-pong": {**EVALUATE, "fsdp": True, "ping_pong": True, "trace": ""},
    "held out": {"eval_fraction": 0.25},
    "bfloat16, compare": {**MASTER, "compare": True},
    "bfloat16, fsdp": {**MASTER, "fsdp": True},
    "bfloat16, all": {**MASTER, **CHECKPOINT, "fsdp": True, "ping_pong": True, "compare": True},
    "checkpoint": CHECKPOINT,
    "checkpoint, fsdp": {**CHECKPOINT, "fsdp": True},
    "checkpoint, ping-pong": {**CHECKPOINT, "ping_pong": True},
    "checkpoint, retain": {**CHECKPOINT, "retain_bytes": 1 << 20},
    "head-tail": {"homes": "head-tail", "context": 2},
    "head-tail, all": {
        "homes": "head-tail",
        "context": 2,
        "fsdp": True,
        "ping_pong": True,
        "compare": True,
        **CHECKPOINT,
    },
    "head-tail, evaluate": {**EVALUATE, "homes": "head-tail"},
    "accumulate": ACCUMULATE,
    "accumulate, fsdp": {**ACCUMULATE, "fsdp": True},
    "accumulate, ping-pong": {**ACCUMULATE, "ping_pong": True},
    "accumulate, ping-pong, fsdp, compare": {**ACCUMULATE, "ping_pong": True, "fsdp": True, "compare": True},
}


class Counter(TorchDispatchMode):
    """Counts the calls of operators of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.number: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[str(function)] += 1
        return function(*args, **(kwargs or {}))


@without_pictures()
def _train_all(runs: dict[str, TrainConfig], folder: Path) -> None:
    for name, config in runs.items():
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(config, folder / name)
    for name in [name for name in runs if name.startswith("accumulate")]:
        again = folder / f"{name}, resumed"
        if dist.get_rank() == 0:
            shutil.copytree(folder / name, again)
            for step in (2, 3):
                shutil.rmtree(whole_checkpoints(again)[step])
        dist.barrier()
        train(resumed_config(again, {}), again)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        data = folder / "data"
        data.mkdir()
        for number in range(12):
            text = f"line {number} of a text that repeats itself\n" * (40 if number % 6 == 0 else 1 + number)
            (data / f"{number:02}.txt").write_text(text)
        shutil.copytree(data, folder / "other")
        configs = {name: replace(SMALL, data=data, **options) for name, options in RUNS.items()}
        for name, config in configs.items():
            if config.eval_data is not None:
                configs[name] = replace(config, eval_data=folder / config.eval_data)
        launch(_train_all, configs, folder, ranks=2)
        return folder

    return made_once(tmp_path_factory, "runs_with_features", make)


def _of_steps(run_dir: Path, name: str) -> list[float]:
    return [step[name] for step in metrics_in(run_dir)]


def _evaluated(run_dir: Path) -> dict[int, float]:
    """The evaluation's loss by step, for the steps that have one."""
    return {step["step"]: step["eval_loss"] for step in metrics_in(run_dir) if "eval_loss" in step}


def _weights(run_dir: Path) -> dict[str, bytes]:
    """The bytes of the tensors in the last checkpoint."""
    last = list(whole_checkpoints(run_dir).values())[-1]
    return {path.name: path.read_bytes() for path in last.glob("*.distcp")}


def test_gradients_are_clipped_by_their_norm_over_all_ranks(runs: Path) -> None:
    losses, norms = (_of_steps(runs / "clip", name) for name in ("loss", "grad_norm"))
    assert min(norms) > 2 * CLIP["clip_norm"], "nothing was clipped"
    for name in ("clip, fsdp", "clip, compare"):
        assert _of_steps(runs / name, "loss") == pytest.approx(losses, rel=1e-6)
        assert _of_steps(runs / name, "grad_norm") == pytest.approx(norms, rel=1e-5)
    plain = _of_steps(runs / "plain", "loss")
    assert losses[0] == plain[0] and losses[2] != plain[2]
    assert _of_steps(runs / "clip far above", "loss") == plain


def test_accumulated_micro_batches_are_one_step_with_all_wrappers_and_after_a_resume(runs: Path) -> None:
    losses, norms = (_of_steps(runs / "accumulate", name) for name in ("loss", "grad_norm"))
    assert len(losses) == 3
    for name in [name for name in RUNS if name.startswith("accumulate")]:
        assert _of_steps(runs / name, "loss") == pytest.approx(losses, rel=1e-5), name
        assert _of_steps(runs / name, "grad_norm") == pytest.approx(norms, rel=1e-4), name
        assert _of_steps(runs / name, "tokens") == [2 * 3 * 96] * 3
        assert _of_steps(runs / f"{name}, resumed", "loss") == _of_steps(runs / name, "loss"), name
        assert _of_steps(runs / f"{name}, resumed", "grad_norm") == _of_steps(runs / name, "grad_norm"), name


def test_bfloat16_with_weights_in_float32_is_near_the_run_in_float32(runs: Path) -> None:
    plain = _of_steps(runs / "plain", "loss")
    for name in [name for name in RUNS if name.startswith("bfloat16")]:
        losses = _of_steps(runs / name, "loss")
        assert losses == pytest.approx(plain, rel=1e-3) and losses != pytest.approx(plain, rel=1e-6), name
        state: dict[str, Any] = {"model": {"lm_head.weight": torch.zeros(256, 32)}, "optimizer": {}}
        dcp.load(state, checkpoint_id=whole_checkpoints(runs / name)[3], no_dist=True)
        assert not torch.equal(state["model"]["lm_head.weight"], state["model"]["lm_head.weight"].bfloat16().float())
    with pytest.raises(ConfigError, match="--master-weights is True, must be left out with --dtype float32"):
        TrainConfig(master_weights=True)


def test_rotary_frequencies_stay_in_float32_in_a_model_of_bfloat16() -> None:
    with one_rank():
        model = build_model(replace(SMALL, dtype="bfloat16"), 256)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_checkpointed_layers_have_the_losses_of_the_others_and_move_as_much(runs: Path) -> None:
    for name in [name for name in RUNS if name.startswith("checkpoint")]:
        assert _of_steps(runs / name, "loss") == pytest.approx(_of_steps(runs / "plain", "loss"), rel=1e-6), name


def test_steps_are_the_same_wherever_documents_lie(runs: Path) -> None:
    for name in [name for name in RUNS if name.startswith("head-tail")]:
        assert _of_steps(runs / name, "loss") == pytest.approx(_of_steps(runs / "plain", "loss"), rel=1e-6), name
        assert _of_steps(runs / name, "tokens") == _of_steps(runs / "plain", "tokens"), name
    assert _of_steps(runs / "head-tail", "bytes") != _of_steps(runs / "plain", "bytes")
    evaluated = [_evaluated(runs / name) for name in ("evaluate", "head-tail, evaluate")]
    assert list(evaluated[1].values()) == pytest.approx(list(evaluated[0].values()), rel=1e-6)


def test_attention_of_a_checkpointed_layer_runs_once(tmp_path: Path) -> None:
    steps, linear = {}, {}
    for checkpointed in (False, True):
        config = replace(SMALL, steps=1, ranks=1, checkpoint_activations=checkpointed)
        calls = Counter()
        (tmp_path / str(checkpointed)).mkdir()
        with one_rank(), calls:
            train(config, tmp_path / str(checkpointed))
        steps[checkpointed] = calls.number["distca.core_attention.default"]
        linear[checkpointed] = calls.number["aten.mm.default"]
    assert steps[True] == steps[False] == 2
    # Without checkpointing, each of two layers runs six products fewer: all but the last, whose output backward does
    # not need.
    assert linear[True] == linear[False] + 2 * 6


def test_an_evaluation_changes_no_step_and_has_the_loss_of_the_weights_of_its_step(runs: Path) -> None:
    assert _of_steps(runs / "evaluate", "loss") == _of_steps(runs / "plain", "loss")
    assert _weights(runs / "evaluate") == _weights(runs / "plain")
    name = "evaluate, fsdp, ping-pong"
    assert _of_steps(runs / name, "loss") == pytest.approx(_of_steps(runs / "plain", "loss"), rel=1e-6)
    found = [_evaluated(runs / run) for run in ("evaluate", name)]
    assert list(found[0]) == list(found[1]) == [1, 2]  # evaluated at every second step and at the last one
    assert list(found[0].values()) == pytest.approx(list(found[1].values()), rel=1e-5)
    assert found[0][2] < found[0][1] < _of_steps(runs / "plain", "loss")[0]
    assert json.loads((runs / "evaluate" / "summary.json").read_text())["eval_loss"] == found[0][2]
    events = EventAccumulator(str(runs / "evaluate" / "tensorboard")).Reload().Scalars("evaluation loss")
    assert [(event.step, event.value) for event in events] == [(s, pytest.approx(v)) for s, v in found[0].items()]
    assert list(_evaluated(runs / "held out")) == [2]


def test_documents_are_held_out_by_the_seed_and_not_trained_on() -> None:
    corpus = Corpus.of([bytes([number]) * 3 for number in range(40)])
    train_on, held_out = corpus.split(0.2, seed=3)
    assert (len(train_on), len(held_out), held_out.lengths()) == (32, 8, [3] * 8)
    assert sorted(contents_of(train_on) + contents_of(held_out)) == contents_of(corpus)
    assert (
        contents_of(corpus.split(0.2, seed=3)[1]) == contents_of(held_out) != contents_of(corpus.split(0.2, seed=4)[1])
    )
    fingerprints = {one.fingerprint for one in (corpus, train_on, held_out, corpus.split(0.2, seed=4)[0])}
    assert len(fingerprints) == 4 and corpus.split(0.2, seed=3)[0].fingerprint == train_on.fingerprint
    assert [len(part) for part in Corpus.of([b"ab", b"cd"]).split(0.01, 0)] == [1, 1]
    for documents in ([b"ab"], [b"ab", b"c"]):
        with pytest.raises(DataError, match=r"has two or more tokens, with --eval-fraction 0\.5"):
            Corpus.of(documents).split(0.5, 0)


# ---- tracking


WANDB = """
import json, pathlib
class Error(Exception): pass
class Run:
    def __init__(self, options):
        self.id = options.get("id", "first")
        self.lines = pathlib.Path(options["dir"], "told")
        self.tell(options)
    def tell(self, what):
        with self.lines.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, scalars, step):
        self.tell([step, scalars["loss"]])
    def finish(self, exit_code):
        self.tell(exit_code)
def init(**options):
    return Run(options)
"""


def test_a_tracked_run_tells_wandb_every_step_once_and_goes_on_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    with one_rank():
        train(replace(SMALL, ranks=1, steps=2, track="wandb"), run)
    with one_rank():
        train(resumed_config(run, {"steps": 3}), run)
    del sys.modules["wandb"]
    first, *told, again, third, code = [json.loads(line) for line in (run / "told").read_text().splitlines()]
    losses = _of_steps(run, "loss")
    assert told == [[0, losses[0]], [1, losses[1]], 0] and third == [2, losses[2]] and code == 0
    assert (first["project"], first["name"], first["config"]["steps"]) == ("distca", "run", 2)
    assert "id" not in first and (again["id"], again["resume"]) == ("first", "allow")


def test_wandb_itself_takes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with one_rank():
        train(replace(SMALL, ranks=1, steps=1, track="wandb"), tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert resumed_config(tmp_path, {"steps": 2}).steps == 2


def test_tracking_without_the_package_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    assert main(["train", "--track", "wandb", "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "--track is wandb, which is not installed: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
