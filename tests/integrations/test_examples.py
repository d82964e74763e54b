"""The examples print the right things when run by the commands that their docstrings name."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "lightning_fit": ["lightning"],
    "ping_pong": ["greenlet"],
    "transformers_trainer": ["accelerate"],
    "trl_sft": ["trl", "datasets"],
}
NUMBER = r"(\d[\d.,e+-]*)"


def _run(example: Path, *arguments: str) -> str:
    """What the example prints when run by the first command of its docstring."""
    found = re.search(
        rf"^    (python|torchrun) (.*examples/{example.name})(?: +#.*)?$", example.read_text(), re.MULTILINE
    )
    assert found, f"{example.name}: its docstring has no command"
    python = [sys.executable] if found[1] == "python" else [sys.executable, "-m", "torch.distributed.run"]
    # PET_STANDALONE is torchrun's --standalone: a port that is free.
    environment = {"PET_STANDALONE": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*python, *shlex.split(found[2]), *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _numbers(pattern: str, text: str) -> list[list[float]]:
    """The numbers in every line that is like the pattern; # in the pattern stands for a number."""
    regex = re.compile(re.escape(pattern).replace(r"\#", NUMBER))
    return [[float(number.replace(",", "")) for number in found.groups()] for found in regex.finditer(text)]


# ---- a check for each example


def _check_plain_loop(text: str) -> None:
    steps = _numbers("step #: loss # on two ranks, # in one process", text)
    assert [step for step, _, _ in steps] == [0, 1, 2]
    for _, on_ranks, alone in steps:
        assert on_ranks == pytest.approx(alone, rel=1e-6)
    assert steps[-1][1] < steps[0][1]
    [[before, after]] = _numbers("imbalance # -> #", text)
    assert before > 1.5 and after <= 1.01
    [plan] = re.findall(r"^Plan\(.*\)$", text, re.MULTILINE)
    assert plan in (ROOT / "docs/quickstart.md").read_text()  # with its digest, which is the same on every machine
    [[_, difference]] = _numbers("largest difference of a weight after # steps: #", text)
    assert difference < 1e-6


def _check_choose_homes(text: str) -> None:
    losses = {way: _numbers(f"{way}: losses # # # # #", text)[0] for way in ("packed", "spread")}
    assert losses["spread"] == pytest.approx(losses["packed"], abs=1e-5)
    assert losses["spread"][-1] < losses["spread"][0] - 0.5
    [[difference]] = _numbers("largest difference of a loss: #", text)
    assert difference < 1e-5
    sent = {
        way: _numbers(f"{way}: in a layer of the last step ranks send # bytes, the busiest #", text)[0]
        for way in losses
    }
    assert sent["spread"][1] < 1.1 * sent["spread"][0] and sent["packed"][1] > 1.5 * sent["packed"][0]


def _check_ping_pong(text: str) -> None:
    steps = _numbers("step #: loss #, outputs and gradients of both ways have the same bits", text)
    assert [step for step, _ in steps] == [0, 1, 2]
    assert steps[-1][1] < steps[0][1]
    for way in ("one after the other", "ping-pong"):
        [[milliseconds]] = _numbers(f"{way}: ranks waited # ms a step", text)
        assert milliseconds >= 0


def _check_pipeline(text: str) -> None:
    assert "stage 1:  . F0 B0 F1 B1 F2 B2 F3 B3  ." in text
    [[before, after]] = _numbers("largest load over the mean, all ticks: # -> #", text)
    assert before > 1.5 and after <= 1.03
    steps = _numbers("step #: loss #", text)
    assert [step for step, _ in steps] == [0, 1, 2, 3, 4]
    assert all(later < earlier for (_, earlier), (_, later) in itertools.pairwise(steps))


def _check_shared_prompts(text: str) -> None:
    [repeated], [shared] = (
        _numbers(f"{way}: # rows, # ms a step, losses # # # #", text) for way in ("repeated", "shared")
    )
    assert (repeated[0], shared[0]) == (11_520, 2_828)
    assert shared[2:] == pytest.approx(repeated[2:], abs=2e-6)
    assert shared[-1] < shared[2] - 0.2
    [[difference]] = _numbers("largest difference of a weight: #", text)
    assert difference < 1e-5


def _check_plan_my_lengths(text: str) -> None:
    ranks = _ranks_of(text)
    assert len(ranks) == 4
    assert sum(before for _, _, before, _ in ranks) == sum(after for _, _, _, after in ranks)
    assert max(after for _, _, _, after in ranks) <= 1.05 * sum(before for _, _, before, _ in ranks) / 4


def _ranks_of(text: str) -> list[tuple[int, ...]]:
    """For every rank: its documents, its tokens, and its load before and after balancing."""
    lines = re.findall(r"^ *\d+((?:  +[\d,]+){4})$", text.split("largest load")[0], re.MULTILINE)
    return [tuple(int(number.replace(",", "")) for number in line.split()) for line in lines]


def _check_transformers_trainer(text: str) -> None:
    steps = _numbers("step #: loss # on 2 ranks, # in one process, imbalance # -> #", text)
    assert [step for step, *_ in steps] == [0, 1, 2, 3, 4, 5]
    for _, on_ranks, alone, _, after in steps:
        assert on_ranks == pytest.approx(alone, rel=1e-4)
        assert after <= 1.02
    assert steps[-1][1] < 0.8 * steps[0][1]
    assert max(before for *_, before, _ in steps) > 1.5


def _check_trl_sft(text: str) -> None:
    steps = _numbers("step #: loss #, imbalance # -> #", text)
    assert [step for step, *_ in steps] == list(range(1, 17))
    assert steps[-1][1] < 0.5 * steps[0][1]
    assert all(after <= 1.02 for *_, after in steps)
    assert max(before for *_, before, _ in steps) > 1.2


def _check_lightning_fit(text: str) -> None:
    steps = _numbers("step #: loss #, imbalance # -> #", text)
    assert [step for step, *_ in steps] == list(range(1, 17))
    assert all(after <= 1.02 for *_, after in steps)
    assert max(before for *_, before, _ in steps) > 1.5
    validations = _numbers("epoch #: validation #", text)
    assert [epoch for epoch, _ in validations] == [0, 1]
    assert validations[1][1] < 0.6 * validations[0][1]


CHECKS: dict[str, Callable[[str], None]] = {
    "ping_pong": _check_ping_pong,
    "pipeline": _check_pipeline,
    "choose_homes": _check_choose_homes,
    "lightning_fit": _check_lightning_fit,
    "plain_loop": _check_plain_loop,
    "plan_my_lengths": _check_plan_my_lengths,
    "shared_prompts": _check_shared_prompts,
    "transformers_trainer": _check_transformers_trainer,
    "trl_sft": _check_trl_sft,
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_prints_what_is_right(example: Path) -> None:
    assert example.stem in CHECKS, f"write a check of what {example.name} prints"
    for package in NEEDS.get(example.stem, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    CHECKS[example.stem](_run(example))


def test_the_loads_of_ones_own_lengths_are_the_visible_pairs_of_all_query_heads(tmp_path: Path) -> None:
    lengths = [[700, 30], [5, 2000], [64]]
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(lengths))
    shape = ["--q-heads", "4", "--kv-heads", "2", "--dim", "16", "--tolerance", "0.1"]
    ranks = _ranks_of(_run(ROOT / "examples/plan_my_lengths.py", str(path), *shape))
    pairs = [4 * sum(n * (n + 1) // 2 for n in documents) for documents in lengths]
    assert [rank[:3] for rank in ranks] == [
        (len(documents), sum(documents), load) for documents, load in zip(lengths, pairs, strict=True)
    ]
    after = [rank[3] for rank in ranks]
    assert sum(after) == sum(pairs)
    assert max(after) <= 1.1 * sum(pairs) / 3
