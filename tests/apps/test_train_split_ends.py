"""Runs whose processes share the model, killed at random moments: all processes end, and the run goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from distca.apps.train.checkpoint import whole_checkpoints
from support.train_runs import ranks_of, start, write_texts

SECONDS = 2.0
"""Within these after a kill no process of the run is left."""

FORMS = {
    "stages of tensor ranks": ("--ranks", "4", "--tokens-per-rank", "128", "--pipeline", "2", "--tensor", "2"),
    "shards in stages": ("--ranks", "4", "--tokens-per-rank", "64", "--pipeline", "2", "--tensor", "1", "--fsdp"),
    "tensor ranks": ("--ranks", "4", "--tokens-per-rank", "64", "--pipeline", "1", "--tensor", "2", "--no-fsdp"),
    "chunks": ("--ranks", "4", "--tokens-per-rank", "64", "--pipeline", "2", "--tensor", "1", "--chunks", "2"),
}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _killed(arguments: list[str], run: Path, taken: int, chance: random.Random) -> tuple[float, str, str]:
    """Starts a run and kills a rank a random time after it has written a checkpoint.

    Returns:
        The seconds until no process of it was left, the name of the killed rank, and what the run wrote to stderr.
    """
    with start(arguments) as process:
        deadline = time.monotonic() + 120
        while not any(step > taken for step in whole_checkpoints(run)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no checkpoint within 120 seconds"
            time.sleep(0.01)
        ranks = ranks_of(process)
        assert len(ranks) == 4
        time.sleep(chance.random())
        victim = chance.choice(sorted(ranks))
        begin = time.monotonic()
        os.kill(ranks[victim], signal.SIGKILL)
        while any(map(_is_running, [*ranks.values(), process.pid])) and time.monotonic() < begin + 60:
            time.sleep(0.005)
        seconds = time.monotonic() - begin
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    return seconds, victim, err


def test_a_killed_rank_ends_all_processes_within_two_seconds_and_the_run_goes_on_in_another_form(
    tmp_path: Path,
) -> None:
    """Each form is killed, and the next one goes on from it; the first one does from the last."""
    write_texts(tmp_path / "data")
    run, chance = tmp_path / "runs" / "run", random.Random("moments and ranks")
    arguments = ["--hidden", "32", "--layers", "4", "--micro-batches", "4", "--checkpoint-every", "1"]
    arguments += ["--steps", "100000", "--data", str(tmp_path / "data"), "--runs-dir", str(run.parent), "--name", "run"]
    taken = 0
    for form in (*FORMS, next(iter(FORMS))):
        seconds, victim, err = _killed(["-m", "distca", "train", *arguments, *FORMS[form]], run, taken, chance)
        print(f"{form}: {victim} was killed, all were gone after {seconds:.2f} s")
        rank = victim.rpartition("-")[2]
        assert err.splitlines()[-1] == f"distca train: error: rank {rank} of 4 was killed by signal SIGKILL"
        assert seconds <= SECONDS
        taken_before, taken = taken, list(whole_checkpoints(run))[-1]
        assert taken > taken_before
        arguments = ["--resume", str(run)]
