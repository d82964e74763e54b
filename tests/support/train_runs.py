"""Runs of `distca train`, in processes of their own or inside the test's process."""

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Makes this process the only rank, which starts at once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def write_texts(folder: Path) -> Path:
    """Writes twelve texts of very different lengths, and a file that is none."""
    folder.mkdir()
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (40 if number % 6 == 0 else 1 + number)
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "noise").write_bytes(b"\xff\xff")
    return folder


def command(tmp_path: Path, *options: str) -> list[str]:
    """The arguments of a small run whose data and runs are below this folder."""
    small = ["--tokens-per-rank", "192", "--hidden", "32", "--layers", "1", "--heads", "4", "--name", "run"]
    places = ["--data", str(tmp_path / "data"), "--runs-dir", str(tmp_path / "runs")]
    return ["-m", "distca", "train", *small, *places, *options]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def metrics_of(tmp_path: Path) -> list[dict]:
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def summary_of(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
