"""The tokens of `distca train`: made once, mapped by every rank, and made anew when anything changes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distca.apps.cli import main
from distca.apps.common import corpus as module
from distca.apps.common.corpus import read_corpus
from distca.apps.common.sources import DataError, find_source
from distca.apps.train.config import TrainConfig
from distca.apps.train.metrics import describe
from distca.apps.train.trainer import train
from distca.errors import DistcaError
from support.train_runs import contents_of, one_rank

tokenizers = pytest.importorskip("tokenizers")
from distca.apps.common.tokens import Tokenizer  # noqa: E402

TEXTS = ["one two three four", "two", "three three three", "four one"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTCA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "below").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (tmp_path / "data" / ("below" if number % 2 else "") / f"{number}.txt").write_text(text)
    return tmp_path / "data"


def _tokenizer(folder: Path, words: str) -> Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words.split())}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def _times_made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made: list[Path] = []
    make = module._make
    monkeypatch.setattr(module, "_make", lambda folder, *rest: (made.append(folder), make(folder, *rest)))
    return made


def test_tokens_are_made_once_and_anew_when_contents_tokenizer_or_the_kept_part_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _times_made(monkeypatch)
    first = _tokenizer(tmp_path / "first", "? one two three four")
    expected = [[1, 2, 3, 4], [3, 3, 3], [2], [4, 1]]  # in the order of paths: 0, 2, below/1, below/3
    for _ in range(2):
        corpus = read_corpus(folder, 1.0, first)
        assert contents_of(corpus) == expected and corpus.vocabulary(first) == 5
    assert len(made) == 1
    again = _tokenizer(tmp_path / "copy", "? one two three four")
    assert contents_of(read_corpus(folder, 1.0, again)) == expected and len(made) == 1
    for file in folder.rglob("*.txt"):
        os.utime(file, ns=(1, 1))  # only the time of the file changes
    assert contents_of(read_corpus(folder, 1.0, first)) == expected and len(made) == 1
    other = _tokenizer(tmp_path / "other", "? four three two one")
    assert contents_of(read_corpus(folder, 1.0, other))[0] == [4, 3, 2, 1] and len(made) == 2
    assert contents_of(read_corpus(folder, 0.5, first)) == [[1, 2], [3, 3], [2], [4]] and len(made) == 3
    assert contents_of(read_corpus(folder, 1.0))[2] == list(b"two") and len(made) == 4
    (folder / "2.txt").write_text("four two two two!")  # the length stays the same
    assert contents_of(read_corpus(folder, 1.0, first))[1] == [4, 2, 2, 2, 0] and len(made) == 5
    (folder / "5.txt").write_text("one")
    assert len(read_corpus(folder, 1.0, first)) == 5 and len(made) == 6


def _read(folder: Path, barrier: object, pipe: multiprocessing.connection.Connection) -> None:
    make = module._make
    made = []
    module._make = lambda *arguments: (made.append(1), make(*arguments))
    barrier.wait()  # type: ignore[attr-defined]
    pipe.send((read_corpus(folder, 1.0).fingerprint, len(made)))


def test_a_file_may_have_a_name_in_any_encoding(folder: Path) -> None:
    before = len(read_corpus(folder, 1.0, None))
    (folder / os.fsdecode(b"b\xe4d.txt")).write_text("four two")
    assert len(read_corpus(folder, 1.0, None)) == before + 1


def test_of_ranks_that_come_at_once_one_makes_the_tokens_and_the_others_wait(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, ends = context.Barrier(4), [context.Pipe(duplex=False) for _ in range(4)]
    ranks = [context.Process(target=_read, args=(folder, barrier, end)) for _, end in ends]
    for rank in ranks:
        rank.start()
    found = [end.recv() for end, _ in ends]
    for rank in ranks:
        rank.join()
    assert len({fingerprint for fingerprint, _ in found}) == 1
    assert sum(made for _, made in found) == 1


def test_what_a_killed_process_left_is_made_anew_and_nothing_half_made_stays(folder: Path, cache: Path) -> None:
    whole = contents_of(read_corpus(folder, 1.0))
    (made,) = cache.glob("*/corpus.json")
    key = made.parent
    key.rename(key.with_suffix(".partial"))
    (key.with_suffix(".partial") / "tokens.bin").write_bytes(b"half")
    assert contents_of(read_corpus(folder, 1.0)) == whole
    assert not list(cache.glob("*.partial"))
    with pytest.raises(DataError, match="holds no text"):
        (folder.parent / "empty").mkdir()
        read_corpus(folder.parent / "empty", 1.0)
    assert not list(cache.glob("*.partial")) and len(list(cache.glob("*/corpus.json"))) == 1
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("left", [b"", b"0" * 63, b"\xff" * 64], ids=["nothing", "a part", "noise"])
def test_a_digest_that_a_loss_of_power_cut_short_stands_for_no_corpus(left: bytes, folder: Path, cache: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "0.txt").write_text("another text")
    for data in (folder, folder.parent / "other"):
        read_corpus(data, 1.0)
    for file in cache.glob("*.content"):
        file.write_bytes(left)
    assert contents_of(read_corpus(folder, 1.0))[0] == list(b"one two three four")
    assert contents_of(read_corpus(folder.parent / "other", 1.0)) == [list(b"another text")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda made: (made / "tokens.bin").write_bytes(b"x"),
        lambda made: (made / "ends.bin").write_bytes(array("q", [5, 3, 7, 48]).tobytes()),
        lambda made: (made / "ends.bin").unlink(),
        lambda made: (made / "corpus.json").write_text("{}"),
        lambda made: (made / "corpus.json").write_text((made / "corpus.json").read_text().replace('"B"', '"i"')),
    ],
)
def test_damaged_tokens_are_refused_by_name(damage: object, folder: Path, cache: Path) -> None:
    read_corpus(folder, 1.0)
    (made,) = (path.parent for path in cache.glob("*/corpus.json"))
    damage(made)  # type: ignore[operator]
    with pytest.raises(DataError, match=f"{made} are damaged .*: remove that folder"):
        read_corpus(folder, 1.0)


def test_a_cache_that_cannot_be_written_says_how_to_name_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_CACHE", str(folder / "0.txt" / "cache"))
    with pytest.raises(
        DistcaError, match=r"the cache of tokens .* cannot be used: .*name another folder by DISTCA_CACHE"
    ):
        read_corpus(folder, 1.0)


def test_rows_of_parquet_and_of_a_saved_dataset_are_documents_and_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"id": [0, 1, 2, 3], "text": ["one two", None, "zwölf", "x"]})
    tokens = datasets.Dataset.from_dict({"input_ids": [[7, 300, 2], [], [5], [70000]], "text": ["a", "b", "c", "d"]})
    texts.to_parquet(tmp_path / "texts.parquet")
    (tmp_path / "parts").mkdir()
    tokens.to_parquet(tmp_path / "parts" / "0.parquet")
    texts.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "texts.parquet", tmp_path / "saved"):
        corpus = read_corpus(path, 1.0)
        assert contents_of(corpus) == [list(b"one two"), list("zwölf".encode()), list(b"x")]
        assert (corpus.num_skipped, corpus.unit, corpus.vocabulary(None)) == (1, "rows", 256)
    corpus = read_corpus(tmp_path / "parts", 1.0)
    assert contents_of(corpus) == [[7, 300, 2], [5], [70000]] and corpus.vocabulary(None) == 70001
    datasets.Dataset.from_dict({"body": ["x"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(DataError, match="has the columns body; text or input_ids is needed"):
        read_corpus(tmp_path / "other.parquet", 1.0)
    datasets.Dataset.from_dict({"input_ids": [[1, -2]]}).to_parquet(tmp_path / "negative.parquet")
    with pytest.raises(DataError, match="a negative token, -2"):
        read_corpus(tmp_path / "negative.parquet", 1.0)
    datasets.Dataset.from_dict({"input_ids": [1, 2]}).to_parquet(tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match="has a row whose input_ids is 1; a list of tokens is needed"):
        read_corpus(tmp_path / "numbers.parquet", 1.0)
    (tmp_path / "broken.parquet").write_text("no table")
    with pytest.raises(DataError, match="cannot be read by the package datasets"):
        read_corpus(tmp_path / "broken.parquet", 1.0)


def test_tables_of_a_folder_may_be_empty_and_must_have_the_same_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    text = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": []}, features=text).to_parquet(tmp_path / "0.parquet")
    with pytest.raises(DataError, match="holds no text: 0 rows"):
        read_corpus(tmp_path, 1.0)
    datasets.Dataset.from_dict({"text": ["one"]}).to_parquet(tmp_path / "1.parquet")
    assert contents_of(read_corpus(tmp_path, 1.0)) == [list(b"one")]
    datasets.Dataset.from_dict({"content": ["one"]}).to_parquet(tmp_path / "2.parquet")
    with pytest.raises(DataError, match="cannot be read by the package datasets: .*column names don't match") as raised:
        read_corpus(tmp_path, 1.0)
    assert "\n" not in str(raised.value)


def test_a_folder_of_json_lines_has_the_documents_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"text": f"{name}{n}"}) for n in range(2))
        )
    (tmp_path / "data" / "README.md").write_text("what these lines are")
    corpus = read_corpus(tmp_path / "data", 1.0)
    assert contents_of(corpus) == [list(text) for text in (b"a0", b"a1", b"b0", b"b1")] and corpus.unit == "lines"


def test_a_dataset_of_several_splits_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"text": ["one"]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=f"{tmp_path}/d has the splits test, train: name the folder of one of them"):
        read_corpus(tmp_path / "d", 1.0)


def test_documents_to_evaluate_on_with_an_unknown_token_are_refused_before_the_first_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": [[7, 300, 2]]}).to_parquet(tmp_path / "other.parquet")
    message = "--eval-data has token 300, and the model knows 256: "
    small = TrainConfig(ranks=1, steps=1, tokens_per_rank=16, hidden=32, layers=1, data=folder)
    (tmp_path / "run").mkdir()
    with one_rank(), pytest.raises(DataError, match=message):
        train(replace(small, eval_data=tmp_path / "other.parquet"), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    given = [
        "--data",
        str(folder),
        "--eval-data",
        str(tmp_path / "other.parquet"),
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    assert main(["train", *given]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_lines_that_cannot_be_read_are_not_blamed_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}')
    source = find_source(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").unlink()
    monkeypatch.setattr(module, "find_source", lambda path: source)
    with pytest.raises(DataError, match=r"data\.jsonl cannot be read: No such file"):
        read_corpus(tmp_path / "data.jsonl", 1.0)


def test_a_file_that_is_no_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"is neither a folder nor a \.jsonl or \.parquet file"):
        find_source(tmp_path / "file.csv")


def test_a_large_corpus_is_mapped_and_not_read(tmp_path: Path, cache: Path) -> None:
    lines = [json.dumps({"text": f"{number} " * 2000}) for number in range(400)]
    (tmp_path / "large.jsonl").write_text("\n".join(lines))
    corpus = read_corpus(tmp_path / "large.jsonl", 1.0)
    assert len(corpus) == 400 and corpus.tokens.dtype == torch.uint8 and len(corpus.tokens) > 2_000_000
    maps = Path("/proc/self/maps").read_text()
    assert str(cache.resolve()) in maps and "tokens.bin" in maps
    assert bytes(corpus.document(399)[:4].tolist()) == b"399 "


@pytest.mark.parametrize("unit", ["files", "lines", "rows"])
def test_a_run_says_what_of_its_data_was_skipped_whatever_a_document_is(unit: str, tmp_path: Path) -> None:
    texts = [{"text": "one two three four"}, {"other": "five"}, {"text": "six seven"}]
    data = tmp_path / {"files": "data", "lines": "data.jsonl", "rows": "data.parquet"}[unit]
    if unit == "files":
        data.mkdir()
        (data / "0").write_text("one two three four")
        (data / "1").write_bytes(b"\xff")
    elif unit == "lines":
        data.write_text("\n".join(map(json.dumps, texts)))
    else:
        pytest.importorskip("datasets").Dataset.from_list(texts).to_parquet(data)
    (tmp_path / "run").mkdir()
    with one_rank():
        summary = train(
            TrainConfig(ranks=1, steps=1, tokens_per_rank=16, hidden=32, layers=1, data=data), tmp_path / "run"
        )
    assert summary[f"{unit}_skipped"] == 1
    assert re.search(rf"^documents  \d, {unit} skipped because they .*: 1$", describe(summary), re.MULTILINE)
