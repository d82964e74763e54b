"""Runs of `distca train`, in processes of their own or inside the test's process."""

import contextlib
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from distca.apps.common.corpus import Corpus


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Makes this process the only rank, which starts at once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


@contextlib.contextmanager
def without_pictures() -> Iterator[None]:
    """Keeps runs from drawing `plan.png` and `loss.png`, which is half of a short run; all other ranks wait for it."""
    with mock.patch.multiple("distca.apps.train.report", draw_plan=mock.DEFAULT, draw_loss=mock.DEFAULT):
        yield


def write_texts(folder: Path) -> Path:
    """Writes twelve texts of very different lengths, and a file that is none."""
    folder.mkdir()
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (40 if number % 6 == 0 else 1 + number)
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "noise").write_bytes(b"\xff\xff")
    return folder


def contents_of(corpus: Corpus) -> list[list[int]]:
    """The tokens of every document."""
    return [corpus.document(number).tolist() for number in range(len(corpus))]


def command(tmp_path: Path, *options: str) -> list[str]:
    """The arguments of a small run whose data and runs are below this folder."""
    small = ["--tokens-per-rank", "192", "--hidden", "32", "--layers", "1", "--heads", "4", "--name", "run"]
    places = ["--data", str(tmp_path / "data"), "--runs-dir", str(tmp_path / "runs")]
    return ["-m", "distca", "train", *small, *places, *options]


def start(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], text=True, **pipes, **options)


def ranks_of(process: subprocess.Popen[str]) -> dict[str, int]:
    """The process ids of the ranks that a command has started, or the process that it forks ranks from, by names."""
    found, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name, fields = re.fullmatch(r"\d+ \((.*)\) (.*)\n", (folder / "stat").read_text()).groups()
            except (OSError, AttributeError):
                continue
            pid = int(folder.name)
            parents[pid] = int(fields.split()[1])
            if name.startswith("distca-rank"):
                found[pid] = name
    return {name: pid for pid, name in found.items() if process.pid in (parents[pid], parents.get(parents[pid]))}


def metrics_in(run_dir: Path) -> list[dict]:
    """The metrics of each step of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def metrics_of(tmp_path: Path) -> list[dict]:
    """The metrics of each step of the run that `command` starts."""
    return metrics_in(tmp_path / "runs" / "run")


def summary_of(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
