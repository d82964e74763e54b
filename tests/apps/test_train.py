"""`distca train`: its data, its options, and whole runs."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.apps.cli import main
from distca.apps.common.corpus import Corpus, read_corpus
from distca.apps.common.options import ConfigError
from distca.apps.common.packing import NO_TARGET, pack_steps
from distca.apps.common.sources import DataError
from distca.apps.train.cli import train_rank
from distca.apps.train.config import SCHEDULES, TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.log import create_run_dir
from distca.apps.train.optimizer import make_schedule
from support.ranks import launch
from support.train_runs import command, metrics_in, metrics_of, start, summary_of, write_texts

# ---- data ----


def documents(corpus: Corpus) -> list[bytes]:
    """The documents of a corpus whose tokens are bytes."""
    return [bytes(corpus.document(number).tolist()) for number in range(len(corpus))]


def test_files_that_are_not_utf8_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "below" / "deeper").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "below" / "deeper" / "b").write_text("zwölf", encoding="utf-8")
    (tmp_path / "below" / "picture").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    corpus = read_corpus(tmp_path, 1.0)
    assert documents(corpus) == [b"first", "zwölf".encode()]
    assert corpus.num_skipped == 1


def test_the_start_of_each_document_is_kept_and_at_least_one_byte(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("0123456789" * 4)
    (tmp_path / "short").write_text("x")
    assert documents(read_corpus(tmp_path, 0.25)) == [b"0123456789", b"x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ({}, "holds no text: 0 files below it"),
        ({"a": b"", "b": b"\xff"}, "holds no text: 2 files below it, of which 1 are not UTF-8"),
        ({"a": b"x", "b": b"y"}, "no document of two or more bytes"),
    ],
)
def test_a_folder_without_text_is_an_error_that_says_why(
    content: dict[str, bytes] | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_bytes(text)
    with pytest.raises(DataError, match=message) as caught:
        read_corpus(folder, 1.0)
    assert str(folder) in str(caught.value)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match="is neither a folder"):
        read_corpus(tmp_path / "file", 1.0)


def test_the_standard_library_is_the_corpus_by_default() -> None:
    corpus = read_corpus(None, 1 / 16)
    lengths = corpus.lengths()
    assert len(corpus) == len(lengths) > 300
    assert max(lengths) > 10 * sum(lengths) / len(lengths)


def test_every_step_is_full_and_every_document_is_used_once_an_epoch() -> None:
    lengths = [5, 1, 23, 2, 7]
    steps = list(itertools.islice(pack_steps(lengths, 10, seed=3), 19))  # five epochs have 190 tokens
    assert [sum(piece.end - piece.begin for piece in step) for step in steps] == [10] * 19
    seen = {(piece.document, row): 0 for piece in sum(steps, []) for row in range(piece.begin, piece.end)}
    for piece in sum(steps, []):
        for row in range(piece.begin, piece.end):
            seen[piece.document, row] += 1
    assert seen == {(document, row): 5 for document, length in enumerate(lengths) for row in range(length)}
    assert steps == list(itertools.islice(pack_steps(lengths, 10, seed=3), 19))
    assert steps != list(itertools.islice(pack_steps(lengths, 10, seed=4), 19))


@pytest.mark.parametrize(
    "homes",
    [{}, *({"homes": "head-tail", "context": context} for context in (None, 1, 2, 3)), {"homes": "whole"}],
    ids=str,
)
def test_every_row_has_the_next_byte_of_its_document_as_target_across_all_cuts(homes: dict[str, Any]) -> None:
    # No byte occurs twice, so a row names its document and position.
    alphabet = bytes(range(256))
    corpus = Corpus.of([alphabet[0:5], alphabet[5:6], alphabet[6:49], alphabet[49:120]])
    following = {row: row + 1 for row in range(120)} | dict.fromkeys((4, 5, 48, 119), NO_TARGET)
    ranks, tokens = 3, 8
    packed = [
        Batches(corpus, rank=rank, ranks=ranks, tokens_per_rank=tokens, steps=5, seed=1, **homes)
        for rank in range(ranks)
    ]
    most = TrainConfig(ranks=ranks, tokens_per_rank=tokens, **homes).most_rows
    may_differ = homes.get("homes") == "head-tail"
    assert most == tokens or may_differ
    rows: list[int] = []
    for batches in zip(*packed, strict=True):
        valid = 0
        for rank, batch in enumerate(batches):
            count = batch.layout.num_rows(rank)
            assert batch.input_ids.shape == batch.labels.shape == (1, count)
            assert tokens - 2 * ranks <= count <= most if may_differ else count == tokens
            ids = batch.input_ids[0].tolist()
            assert batch.labels[0].tolist() == [following[row] for row in ids]
            valid += int((batch.labels != NO_TARGET).sum())
            rows += ids
        assert [batch.num_targets for batch in batches] == [valid] * ranks
    assert sorted(rows) == list(range(120))


def test_head_tail_long_documents_are_on_their_ranks_from_both_ends_and_short_ones_whole() -> None:
    corpus = Corpus.of([bytes(range(40)), bytes(range(100, 106)), bytes(range(110, 118)), bytes(range(120, 130))])
    layouts = []
    for homes in ({}, {"homes": "head-tail", "context": 2}, {"homes": "head-tail", "context": 1}):
        (batch,) = Batches(corpus, rank=0, ranks=2, tokens_per_rank=32, steps=1, seed=0, **homes)
        layouts.append(batch.layout)
    packed, shared, alone = layouts
    assert packed.document_lengths == shared.document_lengths and sorted(packed.document_lengths) == [6, 8, 10, 40]
    long = packed.document_lengths.index(40)
    for rank, parts in enumerate(([(0, 10), (30, 40)], [(10, 20), (20, 30)])):
        assert [(begin, end) for document, begin, end in shared.segments(rank) if document == long] == parts
        assert shared.num_rows(rank) == 32
    assert len(shared.segments(0)) + len(shared.segments(1)) == 4 + 4  # a short one fills both ranks
    for rank in range(2):  # a group of one rank cuts nothing, but it has long ones before short ones
        own = packed.segments(rank)
        cut = [(d, *part) for d, b, e in own if e - b > 16 for part in ((b, (b + e) // 2), ((b + e) // 2, e))]
        assert alone.segments(rank) == cut + [(d, b, e) for d, b, e in own if e - b <= 16]


def test_head_tail_a_long_document_is_on_as_many_ranks_as_its_keys_leave_for() -> None:
    corpus = Corpus.of([bytes(range(40)), bytes(range(100, 106)), bytes(range(110, 118)), bytes(range(120, 130))])
    (batch,) = Batches(corpus, rank=0, ranks=8, tokens_per_rank=8, steps=1, seed=0, homes="head-tail")
    long = batch.layout.document_lengths.index(40)
    cut = [40 * chunk // 16 for chunk in range(17)]
    for rank in range(8):
        assert batch.layout.num_rows(rank) == 8
        parts = [(begin, end) for document, begin, end in batch.layout.segments(rank) if document == long]
        assert parts == [(cut[rank], cut[rank + 1]), (cut[15 - rank], cut[16 - rank])]


def test_segments_of_a_batch_are_the_rows_of_its_tensors() -> None:
    corpus = Corpus.of([bytes(range(30)), bytes(range(100, 107))])
    for rank in range(2):
        for batch in Batches(corpus, rank=rank, ranks=2, tokens_per_rank=9, steps=6, seed=0):
            ids = batch.input_ids[0]
            begin = 0
            for _, first, last in batch.layout.segments(rank):
                rows = ids[begin : begin + last - first]
                assert torch.equal(rows - rows[0], torch.arange(last - first))
                begin += last - first
            assert begin == len(ids)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks is 0, must be at least 1"),
        ({"tokens_per_rank": -1}, "--tokens-per-rank is -1, must be at least 1"),
        ({"doc_scale": 0.0}, "--doc-scale is 0.0, must be above 0 and at most 1"),
        ({"lr": float("nan")}, "--lr is nan, must be above 0 and finite"),
        ({"tolerance": 1.5}, "--tolerance is 1.5, must be 0 to 1"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads is 3, must be a divisor of --heads (4)"),
        ({"hidden": 100}, "--hidden is 100, must be --heads (4) times a head size"),
        ({"dtype": "float16"}, "--dtype is float16, must be one of float32, bfloat16"),
        ({"clip_norm": 0.0}, "--clip-norm is 0.0, must be above 0 and finite"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1, must be at least 0"),
        ({"weight_decay": float("inf")}, "--weight-decay is inf, must be finite"),
        ({"schedule": "greedy"}, "--schedule is greedy, must be one of cosine_warmup_with_min_lr, "),
        ({"context": 2}, "--context is 2, must be left out without --homes head-tail"),
        ({"homes": "head-tail", "context": 0}, "--context is 0, must be at least 1"),
        ({"homes": "head-tail", "context": 3, "ranks": 4, "pipeline": 2}, "--context is 3, must be at most the 2 data"),
        ({"schedule": "constant", "warmup_steps": 2}, "--warmup-steps is 2, must be left out with --schedule constant"),
        ({"eval_fraction": 1.0}, "--eval-fraction is 1.0, must be above 0 and below 1"),
        ({"eval_every": 5}, "--eval-every is 5, must be left out without --eval-data or --eval-fraction"),
        ({"eval_steps": 0}, "--eval-steps is 0, must be at least 1"),
        ({"accumulate": 0}, "--accumulate is 0, must be at least 1"),
        ({"seed": 2**64}, "--seed is 18446744073709551616, must be below 2^64"),
        ({"name": "a/b"}, "--name is a/b, must be the name of a folder"),
        ({"name": "a\udcff"}, "--name is a\udcff, must be a path in UTF-8"),
        ({"runs_dir": Path("a\udcff")}, "--runs-dir is a\udcff, must be a path in UTF-8"),
    ],
)
def test_a_wrong_option_names_its_value_and_what_is_allowed(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(**options)


def test_a_mistake_ends_the_command_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    code = main(["train", "--data", str(tmp_path / "missing"), "--runs-dir", str(runs)])
    err = capsys.readouterr().err
    assert (code, err.count("\n"), runs.exists()) == (2, 1, False)
    assert err.startswith("distca train: error: data folder") and "does not exist" in err
    assert main(["train", "--data", str(tmp_path / "missing"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_the_environment_switches_on_an_option_switches_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[TrainConfig] = []
    monkeypatch.setattr(
        "distca.apps.train.cli._train_with_own_ranks", lambda config, resumed: configs.append(config) or 0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("ENABLE_NSYS", "EXPERIMENT_LOG_MEMORY_USAGE"):
        monkeypatch.setenv(name, "1")
    for options in ([], ["--no-nsys"], ["--no-log-memory"]):
        assert main(["train", *options]) == 0
    assert [(config.nsys, config.log_memory) for config in configs] == [(True, True), (False, True), (True, False)]
    monkeypatch.setenv("EXPERIMENT_LOG_MEMORY_USAGE", "often")
    assert main(["train"]) == 2
    assert "EXPERIMENT_LOG_MEMORY_USAGE is 'often'; 1 (on) and 0 (off) are allowed" in capsys.readouterr().err


def test_nsys_without_cuda_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", "--nsys", "--runs-dir", str(tmp_path)]) == 2
    assert "--nsys (or ENABLE_NSYS=1) needs a GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_under_torchrun_ranks_must_agree_with_the_world_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train"]) == 2
    assert "has RANK and WORLD_SIZE, as under torchrun, but not MASTER_ADDR and MASTER_PORT" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["train", "--ranks", "2"]) == 2
    assert "--ranks is 2, must be torchrun's world size (4) or left out" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "first")
    assert main(["train"]) == 2
    assert "environment variable RANK is 'first', must be an integer" in capsys.readouterr().err


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    config = TrainConfig(name="a", runs_dir=tmp_path / "runs")
    assert [create_run_dir(config).name for _ in range(3)] == ["a", "a-2", "a-3"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="where no folder can be made"):
        create_run_dir(TrainConfig(runs_dir=tmp_path / "file"))


def _learning_rates(config: TrainConfig) -> list[float]:
    """The learning rate of each step, and of the step after the last one, relative to --lr."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    schedule = make_schedule(optimizer, config)
    factors = []
    for _ in range(config.steps + 1):
        factors.append(schedule.get_last_lr()[0] / config.lr)
        optimizer.step()
        schedule.step()
    return factors


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_a_tenth() -> None:
    factors = _learning_rates(TrainConfig(steps=40))
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:40] == sorted(factors[5:40], reverse=True) and factors[5] < 1
    assert factors[39] == pytest.approx(0.1)
    assert _learning_rates(TrainConfig(steps=1))[0] == 1.0


def test_every_schedule_is_one_of_transformers_that_takes_the_warm_up() -> None:
    for name in SCHEDULES:
        factors = _learning_rates(TrainConfig(steps=20, schedule=name, warmup_steps=None if name == "constant" else 4))
        assert max(factors) == pytest.approx(1.0), name
        assert (factors[0] < 0.5) == (name != "constant"), name
        assert factors[-2] == pytest.approx(1.0) or "constant" not in name


# ---- whole runs ----

KEYS = {"step", "loss", "tokens", "seconds", "imbalance_before", "imbalance_after", "bytes", "plan_ms"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "data")


def test_a_run_learns_and_writes_metrics_and_summary(data: Path, tmp_path: Path) -> None:
    """This run is started by torchrun. The runs below start their ranks themselves."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable]
    with start([*torchrun, *command(tmp_path, "--steps", "12")]) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    metrics = metrics_of(tmp_path)
    assert [step["step"] for step in metrics] == list(range(12))
    assert all(step.keys() == KEYS for step in metrics)
    assert all(step["tokens"] == 2 * 192 for step in metrics)
    assert all(step["bytes"] > 0 for step in metrics if step["imbalance_before"] > 1.1)
    assert all(step["imbalance_after"] <= step["imbalance_before"] for step in metrics)
    assert any(step["imbalance_after"] < step["imbalance_before"] for step in metrics)
    losses = [step["loss"] for step in metrics]
    assert losses[0] == pytest.approx(5.55, abs=0.3)  # log(256): random weights
    summary = summary_of(tmp_path)
    assert summary["loss_first"] == pytest.approx(sum(losses[:5]) / 5)
    assert summary["loss_last"] == pytest.approx(sum(losses[-5:]) / 5)
    assert summary["loss_ratio"] < 0.9
    assert (summary["steps"], summary["files_skipped"], summary["interrupted"]) == (12, 1, False)
    assert json.loads((tmp_path / "runs" / "run" / "config.json").read_text())["balance"] == "on"
    assert out.count("finished after 12 steps") == 1 and "files skipped because they are not UTF-8 text: 1" in out
    assert "12/12" in err and "imbalance" in err


def _train_each(configs: list[TrainConfig]) -> None:
    for config in configs:
        train_rank(config, config.runs_dir)


def test_the_same_seed_gives_the_same_losses_whether_balanced_or_not(data: Path, tmp_path: Path) -> None:
    small = TrainConfig(steps=3, tokens_per_rank=192, hidden=32, layers=1, data=data)
    configs = []
    for balance, dtype in (("on", "float32"), ("off", "float32"), ("off", "bfloat16")):
        folder = tmp_path / f"{balance}, {dtype}"
        folder.mkdir()
        configs.append(replace(small, balance=balance, dtype=dtype, runs_dir=folder))
    launch(_train_each, configs, ranks=3)
    on, off, in_bf16 = (metrics_in(config.runs_dir) for config in configs)
    assert len(on) == 3
    assert [step["loss"] for step in on] == pytest.approx([step["loss"] for step in off], rel=1e-5)
    assert [step["loss"] for step in on] == pytest.approx([step["loss"] for step in in_bf16], rel=1e-2)
    assert all(step["imbalance_after"] == step["imbalance_before"] > 1 for step in (*off, *in_bf16))
