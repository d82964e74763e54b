"""`distca simulate --search` and `distca plan --compare`: tables, files, "nothing to gain", and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.apps.cli import main
from distca.simulator.strategies import STRATEGIES

SEARCH = ["simulate", "--search", "--gpus", "8", "--tensor", "8", "--tokens-per-rank", "16384", "--sequences", "2"]
SOME = ["--strategies", "unbalanced,all-gather,distca-single"]


def _lengths(tmp_path: Path, lengths: list[int]) -> str:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(lengths))
    return str(path)


def test_the_search_prints_every_strategy_with_its_set_up_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--gpus", "16", "--lengths", _lengths(tmp_path, [100, 8000, 300, 15000]), *SOME]
    assert main([*SEARCH, *arguments, "--json", str(out), "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("modelled, not measured")
    assert [line.split()[0] for line in lines[1:4]] == ["unbalanced", "all-gather", "distca-single"]
    content = json.loads(out.read_text())
    assert content["kind"] == "modelled" and content["verdict"]["ours"] == "distca-single"
    found = content["strategies"]
    assert all(one["parallelism"]["tensor"] == 8 for one in found)
    sums = [sum(one[name] for one in found) for name in ("tried", "slower", "too_large")]
    assert lines[4].startswith(f"{sum(sums)} set-ups: {sums[0]} modelled, {sums[1]} that cannot be faster, {sums[2]} ")
    assert "no GPU run was compared" in lines[5]
    seconds = found[0]["result"]["seconds"]
    error = content["errors"]["seconds"]
    assert f"{seconds / (1 + error):.2f} to {seconds / (1 - error):.2f}s" in lines[1]
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("lengths", "gain"), [([16384], False), ([16384, *[64] * 400], True)], ids=["equal", "unequal"]
)
def test_the_last_line_says_whether_there_is_something_to_gain(
    lengths: list[int], gain: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.json"
    link = {"bandwidth": 1e15, "latency": 0}
    gemm = {"m": 1, "n": 1, "k": 1, "tflops": 1e6}  # attention is nearly all
    device = {"attention": "h200", "gemms": [gemm], "peak_tflops": 1e6, "memory_bandwidth": 1e18, "memory": 1e15}
    cluster.write_text(json.dumps({"ranks": 8, "ranks_per_node": 8, "inside": link, "between": link, "device": device}))
    arguments = ["--tensor", "1", "--pipeline", "1", "--micro-batches", "1", "--sequences", "8"]
    arguments += ["--cluster", str(cluster), "--strategies", "unbalanced,distca-single"]
    assert main([*SEARCH, *arguments, "--lengths", _lengths(tmp_path, lengths), "--seed", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("distca-single / unbalanced" if gain else "nothing to gain: all sequences have equal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "magic"], "strategy 'magic'; allowed are unbalanced, "),
        (["--model", "llama-34b", "--gpus", "1", "--tensor", "1"], "fits into 141 GB a rank: use more ranks"),
        (["--data", "3"], "data 3, tensor 8 can share 2 sequences"),
        (["--sequences", "0"], "--sequences 0: a positive number"),
        (["--chunks", "2"], "leave out --chunks"),
        (["--sweep", "gpus=8"], "--search has no --sweep"),
        (["--steps", "0"], "--steps 0: a positive number"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SEARCH, "--lengths", _lengths(tmp_path, [8000]), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def _workload(tmp_path: Path, documents: list[list[int]]) -> list[str]:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({"documents": documents}))
    return ["plan", "--compare", "--workload", str(path)]


def test_the_comparison_has_balance_and_bytes_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*_workload(tmp_path, [[4000], [2000, 2000]]), "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("planned, not run") and "nothing to gain" not in lines[-1]
    found = {one["strategy"]: one for one in json.loads(out.read_text())["strategies"]}
    assert set(found) == set(STRATEGIES) - {"wlb-no-delay", "ulysses-ring"} and all(
        one["padding"] == 0 for one in found.values()
    )
    alone, gathered, ours = (found[name] for name in ("unbalanced", "all-gather", "distca-single"))
    pairs = [4000 * 4001 / 2, 2000 * 2001]
    assert alone["attention"] == pytest.approx(2 * pairs[0] / sum(pairs), rel=1e-3)
    assert (alone["tokens"], alone["rank_bytes"]) == (1, 0)
    # Each of two ranks sends its half of 8,000 rows of keys and values: 8 heads of 2 x 128 in bf16, there and back.
    assert (gathered["context"], gathered["rank_bytes"]) == (2, 2 * 4000 * 8 * 256 * 2)
    assert gathered["attention"] == pytest.approx(1, abs=1e-3)
    assert ours["attention"] <= 1.05 + 1e-6 and ours["context"] == 1 and ours["rank_bytes"] > 0


def test_the_comparison_says_when_all_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_workload(tmp_path, [[4000], [4000]])) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("nothing to gain: all ranks have equal attention")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "100"], "leave out --window"),
        (["--layout", "packed"], "leave out --layout"),
        (["--context", "2"], "leave out --context"),
        (["--longer-than", "30"], "leave out --longer-than"),
        (["--cost", "nowhere.json"], "nowhere.json is neither a file nor one of"),
        (["--json", "/nowhere/out.json"], "--json /nowhere/out.json cannot be written"),
    ],
)
def test_a_mistake_of_the_comparison_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_workload(tmp_path, [[64], [64]]), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
