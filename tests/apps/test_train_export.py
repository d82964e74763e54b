"""A model on its way into a run and out of it: made on rank 0 and sharded, exported for transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from distca.apps.cli import main
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.config import TrainConfig
from distca.apps.train.model import build_model, wrap
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.ranks import launch
from support.resumed_runs import in_this_process
from support.train_runs import without_pictures

TIED = {  # two kinds of layers, each with rotary frequencies of its own
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "shape").mkdir()
    transformers.Gemma3TextConfig(**TIED, architectures=["Gemma3ForCausalLM"]).save_pretrained(folder / "shape")
    torch.manual_seed(5)
    transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TIED)).save_pretrained(folder / "checkpoint")
    (folder / "data").mkdir()
    for number in range(9):
        (folder / "data" / f"{number}.txt").write_text(f"text {number} that repeats itself, " * (1 + 2 * number))
    return folder


def _config(files: Path, name: str, **options: Any) -> TrainConfig:
    return TrainConfig(steps=2, tokens_per_rank=128, data=files / "data", model=str(files / name), **options)


def _numbers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found}


def _build(files: Path) -> list[tuple[set[str], float, bool, bool]]:
    """For each model: the devices that its weights were made on, the share of them on this rank, whether they equal
    those of the whole model, and whether embeddings are tied.
    """
    found = []
    for name in ("shape", "checkpoint"):
        whole = _numbers(build_model(_config(files, name), 256))
        random = torch.get_rng_state()
        config = _config(files, name, fsdp=True)
        model = build_model(config, 256)
        devices = {parameter.device.type for parameter in model.parameters()}
        wrap(model, config)
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
        sharded = _numbers(model)
        same = sharded.keys() == whole.keys() and all(torch.equal(sharded[key], whole[key]) for key in whole)
        same = same and torch.equal(torch.get_rng_state(), random)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        found.append((devices, local / sum(parameter.numel() for parameter in model.parameters()), same, tied))
    return found


def test_only_rank_0_makes_a_model_that_is_sharded_and_all_have_the_numbers_of_ddp(files: Path) -> None:
    for rank, models in enumerate(launch(_build, files, ranks=2)):
        for devices, part, same, tied in models:
            assert devices == ({"cpu"} if rank == 0 else {"meta"})
            assert part == pytest.approx(0.5, abs=0.05)
            assert same and tied


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "ping-pong": {"ping_pong": True},
    "bfloat16": {"fsdp": True, "dtype": "bfloat16"},
    "master": {"fsdp": True, "ping_pong": True, "dtype": "bfloat16", "master_weights": True},
}


@without_pictures()
def _train_all(files: Path, folder: Path) -> None:
    for name, options in WAYS.items():
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(_config(files, "checkpoint", **options, export=folder / f"{name}, exported"), folder / name)


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    launch(_train_all, files, folder, ranks=2)
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.state_dict()


@pytest.mark.parametrize("name", WAYS)
def test_an_exported_model_is_that_of_the_last_checkpoint(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_the_end = _weights(runs / f"{name}, exported")
    assert main(["export", str(runs / name), str(tmp_path / "later")]) == 0
    assert f"the model after 2 steps is in {tmp_path / 'later'}" in capsys.readouterr().out
    later = _weights(tmp_path / "later")
    assert at_the_end.keys() == later.keys()
    for key, weight in at_the_end.items():
        assert torch.equal(weight, later[key]), key
        assert weight.dtype == (torch.bfloat16 if name == "bfloat16" else torch.float32), key
    config = json.loads((tmp_path / "later" / "config.json").read_text())
    assert "distca" not in json.dumps(config) and config["architectures"] == ["Gemma3ForCausalLM"]


def test_an_export_reads_nothing_but_the_folder_of_the_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.apps.train.cli.start_ranks", in_this_process)
    monkeypatch.setattr("distca.apps.common.options.signal.signal", lambda *_: None)
    (tmp_path / "at home").mkdir()
    monkeypatch.chdir(tmp_path / "at home")
    shutil.copytree(files / "data", "data")
    shutil.copytree(files / "checkpoint", "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "text": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save("tokenizer.json")
    given = ["--data", "data", "--tokenizer", "tokenizer.json", "--model", "model"]
    with without_pictures():
        assert main(["train", "--ranks", "1", "--steps", "1", "--tokens-per-rank", "128", *given]) == 0
    config = json.loads(Path("runs/train/config.json").read_text())
    here = tmp_path / "at home"
    assert config["data"] == str(here / "data") and config["model"] == str(here / "model")
    assert config["tokenizer"] == str(here / "tokenizer.json")
    for name in ("data", "model"):
        shutil.rmtree(name)
    Path("tokenizer.json").unlink()
    monkeypatch.chdir(tmp_path)
    Path("at home/runs/train").rename("moved")
    assert main(["export", "moved", "exported"]) == 0
    exported = _weights(tmp_path / "exported")
    assert exported.keys() == _weights(files / "checkpoint").keys()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")("text").input_ids == [1]


def test_an_export_leaves_what_lies_beside_it_alone_and_goes_to_the_folder_that_a_link_names(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "file").write_text("of the user")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert main(["export", str(runs / "ddp"), str(tmp_path / "new")]) == 0
    assert main(["export", str(runs / "ddp"), str(tmp_path / "link")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "new", "new.partial"]
    assert (tmp_path / "new.partial" / "file").read_text() == "of the user"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        path.name for path in (tmp_path / "empty").iterdir()
    )
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "new.partial").stat().st_mode


def test_a_resumed_run_exports_only_where_it_is_told_again(runs: Path, tmp_path: Path) -> None:
    assert resumed_config(runs / "ddp", {"steps": 3}).export is None
    assert resumed_config(runs / "ddp", {"steps": 3, "export": tmp_path / "new"}).export == tmp_path / "new"


def test_what_cannot_be_exported_is_an_error_that_says_why(
    files: Path, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert main(["train", "--data", str(files / "data"), "--export", str(tmp_path / "used")]) == 2
    assert "used, must be a new or empty folder" in capsys.readouterr().err
    assert main(["export", str(runs / "ddp"), str(tmp_path / "used")]) == 2
    assert "used must be a new or empty folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    run = shutil.copytree(runs / "ddp", tmp_path / "run")
    part = next(iter(whole_checkpoints(run).values())) / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-9] + b"otherwise")
    assert main(["export", str(run), str(tmp_path / "new")]) == 2
    assert "is damaged: its SHA-256 differs" in capsys.readouterr().err
    shutil.rmtree(part.parent)
    assert main(["export", str(run), str(tmp_path / "new")]) == 2
    assert "has no finished checkpoint" in capsys.readouterr().err
    other = shutil.copytree(runs / "ddp", tmp_path / "other")
    (other / "model" / "config.json").write_text("[]")
    assert main(["export", str(other), str(tmp_path / "new")]) == 2
    assert f"the model of the run is {other / 'model'}, whose config.json" in capsys.readouterr().err
    (other / "model" / "config.json").unlink()
    assert main(["export", str(other), str(tmp_path / "new")]) == 2
    assert f"{other / 'model'} has no config.json: restore the folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
