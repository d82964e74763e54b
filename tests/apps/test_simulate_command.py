"""`distca simulate`: the table, the files, and mistakes in one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.apps.cli import main

SHAPE = ["--gpus", "16", "--tensor", "8", "--tokens-per-rank", "8192"]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text("[100, 8000, 300, 50]")
    return str(path)


def test_the_table_has_all_strategies_and_says_that_it_is_modelled(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    pytest.importorskip("matplotlib")
    assert main(["simulate", "--lengths", lengths, *SHAPE, "--json", str(out), "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("modelled, not measured")
    names = ["unbalanced", "variable-chunks", "karmarkar-karp", "wlb", "distca-paper", "distca-paper-fa3"]
    names += ["distca-retained", "distca-single", "distca"]
    assert [line.split()[0] for line in lines[1:]] == names
    content = json.loads(out.read_text())
    assert content["kind"] == "modelled" and all(result["kind"] == "modelled" for result in content["results"])
    assert content["results"][0]["seconds"] == pytest.approx(float(lines[1].split()[1][:-1]), abs=1e-3)
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_several_steps_have_documents_of_their_own(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["simulate", *SHAPE, "--lengths", lengths, "--strategies", "wlb", "--steps", "3", "--json", str(out)]
    assert main(command) == 0
    content = json.loads(out.read_text())
    steps = [content["documents"], *content["following"]]
    assert len(steps) == 3 and steps[0] != steps[1] != steps[2]
    (result,) = content["results"]
    tokens = sum(n for step in steps for of in step for home in of for n in home)
    assert result["tokens_per_second"] * result["seconds"] == pytest.approx(tokens / 3)


def test_lengths_come_from_text_that_train_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 4096 + '"}\n')
    assert main(["simulate", "--lengths", str(tmp_path / "a.jsonl"), *SHAPE, "--strategies", "unbalanced"]) == 0
    assert "unbalanced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor", "3"], "= 63; the cluster has 64 ranks"),
        (["--cluster", "nowhere.toml"], "nowhere.toml is neither a file that can be read nor one of cpu-2, h200-ib400"),
        (["--model", "llama-1t"], "nor one of llama-34b, llama-8b"),
        (["--strategies", "magic", "--gpus", "8"], "strategy 'magic'"),
        (["--sweep", "gpus=many"], "--sweep gpus=many: gpus=N,N or longest=N,N"),
        (["--sweep", "speed=1"], "--sweep speed=1: gpus=N,N or longest=N,N"),
        (["--sweep", "gpus=8", "--gpus", "8"], "leave out --gpus"),
        (["--steps", "0"], "--steps 0: a positive number is expected"),
        (["--tokens-per-rank", "0"], "tokens_per_rank = 0"),
        (["--tokens-per-rank", "10000000000"], "documents, which have 2,112 tokens on average; at most 1,000,000"),
        (["--gpus", "1000000000", "--tensor", "8"], "data x context x pipeline = 125,000,000; at most 4,096"),
        (["--sweep", "longest=99999999999"], "numbers from 1 to 2^31"),
        (["--model", "llama-34b", "--gpus", "1"], "use more tensor or pipeline ranks"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    lengths: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--lengths", lengths, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[NaN]", "document 0 has length nan; 1 to 2^31 are allowed"),
        ("[5, -5]", "document 1 has length -5; 1 to 2^31 are allowed"),
        ("[3000000000]", "document 0 has length 3000000000; 1 to 2^31 are allowed"),
        ('{"lengths": [5]}', "a list of lengths is expected, not dict"),
        ("lengths", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_wrong_list_of_lengths_is_one_line_and_exit_code_2(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.json").write_text(content)
    assert main(["simulate", "--lengths", str(tmp_path / "wrong.json"), *SHAPE]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_without_text_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    assert main(["simulate", "--lengths", str(tmp_path), *SHAPE]) == 2
    error = capsys.readouterr().err
    assert "there are no documents in it" in error and error.count("\n") == 1


def test_an_empty_list_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text("[]")
    assert main(["simulate", "--lengths", str(tmp_path / "none.json"), *SHAPE]) == 2
    assert "there are no lengths" in capsys.readouterr().err


def test_a_sweep_has_the_speed_ups_of_single_runs(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    shape, out, plot = [*SHAPE[2:], "--lengths", lengths], tmp_path / "out.json", tmp_path / "out.png"
    assert main(["simulate", *shape, "--sweep", "gpus=8,16", "--json", str(out), "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("modelled, not measured") and [line.split()[0] for line in lines[2:]] == ["8", "16"]
    assert main(["simulate", *shape, "--gpus", "16", "--json", str(tmp_path / "one.json")]) == 0
    seconds = [one["seconds"] for one in json.loads((tmp_path / "one.json").read_text())["results"]]
    assert [float(word) for word in lines[3].split()[1:]] == pytest.approx([seconds[0] / s for s in seconds], abs=1e-3)
    content = json.loads(out.read_text())
    assert content["kind"] == "modelled" and list(content["steps"]) == ["8", "16"]
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_multiplies_lengths(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["simulate", *SHAPE, "--lengths", lengths, "--sweep", "longest=800,4000", "--json", str(out)]
    assert main([*command, "--strategies", "unbalanced"]) == 0
    steps = json.loads(out.read_text())["steps"]
    longest = {value: max(n for home in step["documents"][0] for n in home) for value, step in steps.items()}
    assert longest == {"800": 800, "4000": 4000}


def test_dtype_and_optimizer_are_those_of_the_options(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["simulate", *SHAPE, "--lengths", lengths, "--strategies", "unbalanced", "--json", str(out)]
    assert main([*command, "--dtype", "fp32", "--whole-optimizer"]) == 0
    content = json.loads(out.read_text())
    assert (content["model"]["dtype"], content["parallelism"]["shard_optimizer"]) == ("fp32", False)
