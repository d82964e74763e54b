"""A damaged run folder of `distca train` is an error that names the file and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from distca.apps.cli import main
from distca.apps.train import manifest
from distca.apps.train.checkpoint import Checkpoints
from distca.apps.train.manifest import CheckpointError
from distca.apps.train.resume import resumed_config
from distca.apps.train.trainer import train
from support.ranks import launch
from support.resumed_runs import LAST, in_this_process, killed_after, losses_of
from support.train_runs import one_rank


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _known_to_the_manifest(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    """The damage, followed by a manifest that fits it, as a hostile author would write."""

    def damaged(path: Path) -> None:
        damage(path)
        manifest.main(str(path.parent))

    return damaged


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("config.json", _cut_off, "is not JSON"),
    ("config.json", lambda path: path.write_text("[1, 2]"), "holds a list, must hold an object"),
    ("config.json", lambda path: path.write_text('{"steps": "many"}'), "--steps is 'many', must be of type int"),
    ("config.json", lambda path: path.write_text(f'{{"lr": 1{"0" * 400}}}'), "--lr is above the largest float"),
    ("config.json", Path.unlink, "must be the folder of a run"),
    ("metrics.jsonl", lambda path: path.write_text("nonsense\n"), "line 1, is not a step of a run"),
    ("metrics.jsonl", lambda path: path.write_text('{"step": 1}\n'), "line 1, is not a step of a run"),
    ("metrics.jsonl", lambda path: path.write_text('{"step": 1, "loss": NaN}\n'), "run (loss is not a finite number)"),
    ("metrics.jsonl", lambda path: path.write_text('{"unbalanced": [1]}\n'), "line 1, is not a step of a run"),
    (f"{LAST}/state.json", _cut_off, "bytes, must have"),
    (f"{LAST}/state.json", _known_to_the_manifest(_cut_off), "is not JSON"),
    (f"{LAST}/state.json", _known_to_the_manifest(lambda path: path.write_text('{"step": "x"}')),
     "must hold the integers step"),
    (f"{LAST}/state.json", _known_to_the_manifest(lambda path: path.write_text('{"step": 5, "ranks": 3, "corpus": 1}')),
     "says that 5 steps were taken, its folder's name says 4"),
    (f"{LAST}/state.json", Path.unlink, "is missing"),
    (f"{LAST}/manifest.json", _cut_off, "is not JSON"),
    (f"{LAST}/manifest.json", lambda path: path.write_text('{"files": 1}'), "must hold bytes and sha256"),
    (f"{LAST}/manifest.json", Path.unlink, "is missing: the checkpoint is damaged, or an earlier version wrote it"),
    (f"{LAST}/.metadata", _cut_off, "bytes, must have"),
    (f"{LAST}/__0_0.distcp", _cut_off, "bytes, must have"),
    (f"{LAST}/__0_0.distcp", Path.unlink, "is missing"),
    (f"{LAST}/__0_0.distcp", flip_a_bit, "its SHA-256 differs"),
    (f"{LAST}/.metadata", flip_a_bit, "its SHA-256 differs"),
    (f"{LAST}/.metadata", _known_to_the_manifest(_cut_off), "is not an index of a checkpoint"),
    (f"{LAST}/.metadata", _known_to_the_manifest(lambda path: path.write_bytes(b"cos\nsystem\n(S'exit'\ntR.")),
     "names os.system, which no index of a checkpoint needs"),
    (f"{LAST}/extra", Path.touch, "it does not belong to this checkpoint; remove it"),
]  # fmt: skip


def test_a_run_folder_that_is_damaged_is_an_error_that_names_the_file_and_what_to_do(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distca.apps.train.cli.start_ranks", in_this_process)
    monkeypatch.setattr("distca.apps.common.options.signal.signal", lambda *_: None)
    for number, (file, damage, said) in enumerate(DAMAGES):
        run_dir = killed_after(tmp_path / str(number), 4, source=whole_run)
        damage(run_dir / file)
        options = ["--ranks", "1", "--tokens-per-rank", "192"]
        assert main(["train", "--resume", str(run_dir), *options]) == 2, (file, said)
        message = capsys.readouterr().err.split("distca train: error: ")[1]
        assert said in message and str(run_dir) in message and message.count("\n") == 1, (file, message)
        if file != "config.json":
            assert "remove" in message, (file, message)


def _refusals(run_dir: Path, checkpoint: str) -> list[str]:
    """The refusal that each rank gets."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(run_dir, keep=1).load(None, run_dir / checkpoint)  # type: ignore[arg-type]  # nothing is read
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, str(caught.value))
    return everyone


def _refusals_of_each_damaged_file(run_dir: Path) -> dict[str, list[str]]:
    told = {}
    for path in sorted((run_dir / LAST).glob("*.distcp")):
        content = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            flip_a_bit(path)
        dist.barrier()
        told[path.name] = _refusals(run_dir, LAST)
        if dist.get_rank() == 0:
            path.write_bytes(content)
    return told


def test_a_damaged_file_that_one_rank_has_compared_is_named_on_all_ranks(whole_run: Path, tmp_path: Path) -> None:
    run_dir = killed_after(tmp_path / "run", 4, source=whole_run)
    told = launch(_refusals_of_each_damaged_file, run_dir, ranks=2)[0]
    assert list(told) == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    for name, (first, second) in told.items():
        assert first == second
        assert f"{name} is damaged: its SHA-256 differs" in first


def test_a_checkpoint_of_a_version_without_manifests_goes_on_once_its_owner_has_made_one(
    whole_run: Path, tmp_path: Path
) -> None:
    run_dir = killed_after(tmp_path / "run", 4, source=whole_run)
    (run_dir / LAST / "manifest.json").unlink()
    state = json.loads((run_dir / LAST / "state.json").read_text())
    (run_dir / LAST / "state.json").write_text(json.dumps(state | {"files": {".metadata": [1, 2]}}))
    given = {"ranks": 1, "tokens_per_rank": 192}
    with pytest.raises(CheckpointError, match=rf"`python -m distca\.apps\.train\.manifest {run_dir / LAST}` makes it"):
        resumed_config(run_dir, given)
    manifest.main(str(run_dir / LAST))
    with one_rank():
        train(resumed_config(run_dir, given), run_dir)
    assert len(losses_of(run_dir)) == 6
