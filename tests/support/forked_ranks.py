"""Processes that a program of a test forks after its imports, because imports take most of a short run.

They begin when `wait_for` is called, so that all are forked while the threads of their stores, which are in this
process, have nothing to do: a lock that such a thread holds in the moment of a fork is never released in the child.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def forked(environment: dict[str, str], run: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks a process that will call `run` with this environment besides its own."""

    def child() -> None:
        os.close(_gate[1])
        os.read(_gate[0], 1)  # ends when the parent closes the gate's other side
        os.environ.update(environment)
        torch.set_num_threads(1)
        try:
            run(*args)
            _leave()
        except BaseException:  # otherwise its peers would wait for it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    return process


def forked_ranks(ranks: int, run: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """Forks ranks with an environment like torchrun's, with a store in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [forked(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, run, *args) for rank in range(ranks)]


def wait_for(processes: Iterable[BaseProcess]) -> None:
    """Lets all processes begin, and waits for them. If one fails, kills the others, which may wait for it, and ends the
    program.
    """
    os.close(_gate[1])
    processes = list(processes)
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                for other in processes:
                    other.kill()
                sys.exit("a process failed")


def _leave() -> None:
    if dist.is_initialized():
        gc.collect()  # DDP's reducer must be freed before the group that it uses
        dist.barrier()
        dist.destroy_process_group()


_stores: list[dist.TCPStore] = []
_gate = os.pipe()


def run_program(program: Path, folder: Path, cases: Iterable[str]) -> Path:
    """Runs such a program, which saves in the folder what its ranks found in the cases. Returns the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(program), str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
