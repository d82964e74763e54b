"""The trainer: what one rank does, from reading the documents to the summary."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from distca.context import Context, init
from distca.errors import DistcaError
from distca.integrations.hf import heads_of, windows_of
from distca.nsys import Capture
from distca.ping_pong import PingPong
from distca.plan_ahead import PlanAhead
from distca.planning import Plans
from distca.train.checkpoint import Checkpoints, RunState, Trained, whole_checkpoints
from distca.train.config import TrainConfig
from distca.train.data import Batch, Batches, Corpus, DataError, read_corpus
from distca.train.files import writing
from distca.train.log import RunLog
from distca.train.memory_log import MemoryLog
from distca.train.metrics import AttentionLoads, StepMetrics
from distca.train.model import build_model, check_positions, wrap
from distca.train.optimizer import make_optimizer
from distca.train.step import compared_step, train_step
from distca.train.tokens import BYTES, Tokenizer
from distca.train.tracing import TRACED_STEPS, StepTraces, trace_files

_SAME_SIGNAL_SECONDS = 0.5  # torchrun repeats the terminal's Ctrl-C


def train(config: TrainConfig, run_dir: Path | None) -> dict[str, Any]:
    """Trains on this rank; `torch.distributed` is initialised. Returns the summary.

    Metrics, summary and checkpoints go to `run_dir`, of which only rank 0 needs to know. Where it holds a checkpoint
    the run goes on from the last one. It ends early, after a whole step, when any rank receives SIGINT or SIGTERM.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokenizer = Tokenizer(config.tokenizer) if config.tokenizer is not None else None
    corpus = read_corpus(config.data, config.kept_fraction, tokenizer)
    _check_same_corpus(corpus)
    model = build_model(config, BYTES if tokenizer is None else tokenizer.vocabulary)
    shape = model.config.get_text_config()
    check_positions(shape, config, max(map(len, corpus.documents)))
    heads, windows = heads_of(shape, config.torch_dtype), windows_of(shape)
    trained = _start_of_training(wrap(model, config), model, config)
    run_dir, last = _agree_on_run(run_dir)
    checkpoints = Checkpoints(run_dir, keep=config.keep_checkpoints)
    start = _resume(trained, checkpoints, last, corpus) if last is not None else 0
    batches = Batches(
        corpus,
        rank=rank,
        ranks=ranks,
        tokens_per_rank=config.tokens_per_rank,
        steps=config.steps,
        seed=config.seed,
        start=start,
    )
    tqdm.set_lock(threading.RLock())  # its default is shared between processes, which nothing here needs
    with (
        stop_request() as stop,
        init(max_tokens=config.tokens_per_rank, heads=heads, timeout=config.timeout, nsys=config.nsys) as context,
        _planned(config, batches, context, windows) as steps,
        tqdm(total=config.steps, initial=start, disable=rank != 0, unit="step", dynamic_ncols=True) as bar,
        RunLog(config, run_dir if rank == 0 else None, corpus, start=start) as log,
        MemoryLog(run_dir / f"memory-rank{rank}.jsonl" if config.log_memory else None, context) as memory,
        closing(Capture(config.nsys, TRACED_STEPS)) as capture,
    ):
        traces = StepTraces(context, trace_files(run_dir, config.trace))
        since = time.perf_counter()
        for step, (work, unbalanced) in enumerate(steps, start):
            note = memory.begin(step, [plans for _, plans in work])
            if unbalanced is None:
                result = train_step(trained, work, stop.requested, since, note)
            else:  # who goes first alternates, so that neither gains by it
                balanced_first = step % 2 == 0
                result = compared_step(trained, work, unbalanced, stop.requested, since, balanced_first, note)
            loads = AttentionLoads.of([plans for _, plans in work], windows)
            traces.step(step, loads.after[rank] + (loads.before[rank] if unbalanced is not None else 0))
            capture.step(step + 1)
            metrics = StepMetrics.of(step, result, [batch.layout for batch, _ in work], loads)
            log.step(metrics, loads)
            bar.set_postfix_str(metrics.line(), refresh=False)
            bar.update()
            if not math.isfinite(result.loss):
                raise DistcaError(f"the loss is {result.loss} at step {step}: lower --lr (now {config.lr:g})")
            taken = step + 1
            if result.interrupted or taken == config.steps or _due(taken, config.checkpoint_every):
                checkpoints.save(trained, RunState(taken, ranks, corpus.fingerprint()))
            if result.interrupted:
                break
            since = time.perf_counter()
        with writing(run_dir):
            traces.write()
        return log.finish(result.interrupted, _notes(trained.model), traces.everyone)


def _due(taken: int, every: int) -> bool:
    return every > 0 and taken % every == 0


def _notes(model: torch.nn.Module) -> list[str]:
    whole = sum(module.unsharded_bytes for module in model.modules() if isinstance(module, PingPong))
    return [f"ping-pong keeps {whole / 1e6:.1f} MB of weights whole on every rank in a step"] if whole else []


def _start_of_training(model: torch.nn.Module, saved: torch.nn.Module, config: TrainConfig) -> Trained:
    optimizer, schedule = make_optimizer(model, config)
    return Trained(model, optimizer, schedule, saved if config.ping_pong else None, config.clip_norm)


Planned = list[tuple[Batch, Plans]]


@contextmanager
def _planned(
    config: TrainConfig, batches: Batches, context: Context, windows: list[int | None]
) -> Iterator[Iterator[tuple[Planned, Planned | None]]]:
    """The work of each step and, where the run compares, the same with plans that compute every row at home."""
    num_parts = 2 if config.ping_pong else 1
    window = windows[0] if len(set(windows)) == 1 else None
    rank = context.rank

    def plan_ahead(balance: bool) -> PlanAhead[Batch, Plans]:
        return PlanAhead(
            (half for batch in batches for half in batch.halves(rank, window)) if config.ping_pong else batches,
            heads=context.heads,
            context=context,
            layout=lambda batch: batch.layout,
            windows=windows,
            tolerance=config.tolerance,
            balance=balance,
            overlap=config.ping_pong,
            retain_bytes=config.retain_bytes,
        )

    def in_steps(planned: Iterable[tuple[Batch | None, Plans]]) -> Iterator[Planned]:
        # Every rank has the same number of batches, so each step has one.
        parts = ((batch, plans) for batch, plans in planned if batch is not None)
        while step := list(itertools.islice(parts, num_parts)):
            yield step

    with plan_ahead(config.balance == "on") as steps, plan_ahead(False) if config.compare else nullcontext() as others:
        unbalanced = in_steps(others) if others is not None else itertools.repeat(None)
        yield zip(in_steps(steps), unbalanced, strict=False)


def _agree_on_run(run_dir: Path | None) -> tuple[Path, Path | None]:
    """Rank 0's folder of the run and its last checkpoint, of which it removes what an earlier kill has left half."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        assert run_dir is not None
        Checkpoints(run_dir, keep=1).remove_leftovers()
        found = [run_dir, next(reversed(whole_checkpoints(run_dir).values()), None)]
    dist.broadcast_object_list(found, src=0)
    return found[0], found[1]


def _resume(trained: Trained, checkpoints: Checkpoints, last: Path, corpus: Corpus) -> int:
    """Loads the checkpoint and returns the number of steps taken."""
    state = checkpoints.load(trained, last)
    if state.corpus != corpus.fingerprint():
        raise DataError(
            f"the documents are not those of the checkpoint {last}: a resumed run needs the same --data and --doc-scale"
        )
    return state.step


def _check_same_corpus(corpus: Corpus) -> None:
    mine = torch.tensor([corpus.fingerprint(), len(corpus.documents)], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, everyone[0]):
            raise DataError(
                f"rank {rank} has read other documents ({int(theirs[1])} of them) than rank 0 ({int(everyone[0][1])}): "
                "all ranks need the same data folder"
            )


@dataclass
class StopRequest:
    """Set once this rank was asked to stop after the current step."""

    requested: bool = False
    at: float = 0.0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a later one ends the process at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.requested and now - request.at > _SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        if not request.requested:
            request.requested, request.at = True, now

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
